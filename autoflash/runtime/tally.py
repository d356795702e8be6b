"""Tally: how often each problem was called, and what served it."""

from __future__ import annotations

from dataclasses import dataclass

from .problem import Problem
from .selection import Choice


@dataclass(slots=True)
class Tally:
    """The calls that posed one problem on one type of device."""

    problem: Problem
    choice: Choice
    calls: int = 0


last_tally: list[Tally | None] = [None]  # of the last call, for explain()


def count_call(tally: Tally | None) -> None:
    """Count a call; None of those that are not counted."""
    if tally is not None:
        tally.calls += 1
        last_tally[0] = tally
