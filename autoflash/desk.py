"""Desk: what several threads ask the one that owns the database to do, one thing after another."""

from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

from autoflash.journal import Journal
from autoflash.records import Decision, Trial

Result = TypeVar("Result")
CLOSED_POLL_S = 0.2


class Stopped(Exception):
    """The search is over: nothing is written any more."""


@dataclass(frozen=True)
class _Left:
    """A thread has ended, with this error where it is no ordinary end."""

    error: BaseException | None


class Desk:
    """`serve` runs in the thread that owns the database; everything else in the others."""

    def __init__(self) -> None:
        self._asked: SimpleQueue[_Left | tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        self.closed = False

    def do(self, work: Callable[[], Result]) -> Result:
        """What `work` gives, once it is done. Raises what it raises, Stopped on a closed desk."""
        if self.closed:
            raise Stopped
        answer: Future[Result] = Future()
        self._asked.put((work, answer))
        # Ctrl-C may take the serving thread away at any instruction, also between the taking of
        # this work and its answer: nobody waits for an answer on a closed desk.
        while not answer.done():
            if self.closed:
                raise Stopped
            wait([answer], CLOSED_POLL_S)
        return answer.result()

    def leave(self, error: BaseException | None = None) -> None:
        """The last word of a thread."""
        self._asked.put(_Left(error))

    def serve(self, threads: int) -> None:
        """Do what is asked until so many threads have left. Raises the first error of one."""
        while threads:
            asked = self._asked.get()
            if isinstance(asked, _Left):
                threads -= 1
                if asked.error is not None:
                    raise asked.error
                continue
            work, answer = asked
            try:
                answer.set_result(work())
            except Exception as error:
                answer.set_exception(error)


class SharedJournal(Journal):
    """A journal of several threads, which writes at a desk."""

    def __init__(self, desk: Desk, *of_journal: Any) -> None:
        super().__init__(*of_journal)
        self._desk = desk

    def record(self, trial: Trial) -> Trial:
        return self._desk.do(lambda: Journal.record(self, trial))

    def decide(self, decision: Decision) -> Decision:
        return self._desk.do(lambda: Journal.decide(self, decision))
