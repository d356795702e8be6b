"""Ahead: a thread that has compiled what will be tried first, while the GPUs are at work."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Event, Thread

from autoflash.contest import first_batch, openings
from autoflash.entrants import Entrants, Lab
from autoflash.problem import Problem

SWITCH_S = 0.0005  # a thread that a GPU waits for gets its turn so soon


@contextmanager
def compiled_ahead(lab: Lab, pairs: Sequence[tuple[Entrants, Problem]]) -> Iterator[None]:
    """Ask for every problem's default at once, and meanwhile for what each will try first.

    To find a problem's candidates takes a tenth of a second, for which no GPU waits. Raises, in
    the end, what the thread raised.
    """
    for entrants, problem in pairs:
        entrants.ask(problem, [entrants.group.default(problem, lab.gpu)])
    over, errors = Event(), []

    def ask() -> None:
        try:
            for batch in (openings, first_batch) if lab.limit.finite else (first_batch,):
                for entrants, problem in pairs:
                    if over.is_set():
                        return
                    entrants.ask(problem, batch(lab, entrants, problem))
        except BaseException as error:
            errors.append(error)

    thread = Thread(target=ask, daemon=True)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(interval_s)
    if errors:
        raise errors[0]
