"""The tables that the functions of this module choose from, and what they chose."""

from __future__ import annotations

import os

import torch

from .bundle import use_bundle
from .device import Device, device_of
from .problem import Problem
from .selection import Selector, Tables
from .served import forget_served
from .tally import Tally
from .trace import add_to_trace, trace_at_exit, trace_text

_selectors: list[Selector] = []
_strict = [False]
_tallies: dict[tuple[Problem, Device, bool], Tally] = {}  # the last: batch_invariant or not


def install_tables(tables: Tables) -> None:
    """Give prefill(), decode() and append_kv() the tables they choose from."""
    _selectors[:] = [Selector(tables)]
    _tallies.clear()
    forget_served()
    trace_at_exit(write_trace)
    if folder := os.environ.get("AUTOFLASH_BUNDLE"):
        use_bundle(folder)


def installed() -> Selector:
    if not _selectors:
        raise RuntimeError(
            "no tables are installed: this is the source, export a module to call it"
        )
    return _selectors[0]


def configure(*, strict: bool) -> None:
    """Whether a call on a GPU that nothing was measured on is an error, LookupError, of that call.

    Without it such a GPU is served by defaults, with one warning.
    """
    _strict[:] = [strict]
    forget_served()  # what is served is asked again


def device_for(q: torch.Tensor) -> Device:
    """The device a tensor lies on; in the interpreter, the first that the tables know."""
    return device_of(q, installed().tables.gpus[0].device)


def tally_for(
    problem: Problem, q: torch.Tensor, batch_invariant: bool = False
) -> tuple[Tally, Device]:
    """What serves the problem where `q` lies, chosen at its first call."""
    device = device_for(q)
    if _strict[0]:
        installed().require_rows(device)
    tally = _tallies.get((problem, device, batch_invariant))
    if tally is None:
        selector = installed()
        choose = selector.choose_invariant if batch_invariant else selector.choose
        tally = Tally(problem, choose(problem, device))
        _tallies[problem, device, batch_invariant] = tally
    return tally, device


def coverage() -> dict[str, int]:
    """How many calls were served how since the module was imported."""
    served = {"exact": 0, "bucket": 0, "nearest": 0, "default": 0}
    for tally in _tallies.values():
        served[tally.choice.how] += tally.calls
    return served


def write_trace(path: str) -> None:
    """Add to the file how often each problem was called, for `autoflash tune --from-trace`.

    With AUTOFLASH_TRACE in the environment a process does so when it ends, to the file it names.
    Calls of append_kv() and replays of CUDA graphs are not counted.
    """
    called = [(device, tally) for (_, device, _), tally in _tallies.items() if tally.calls]
    add_to_trace(path, trace_text(called))
