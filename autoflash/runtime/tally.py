"""Tally: how often each problem was called, and what served it, which explain() tells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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


def explain(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> dict[str, Any]:
    """What serves this call and why, found by making it: `explain(prefill, q, k, v, causal=True)`.

    Gives the problem, family, knobs, `how` (exact, bucket, nearest, default), the distance to the
    tuned sizes in doublings, and the regret measured for the tuned problem.
    """
    last_tally[0] = None
    function(*arguments, **keywords)
    tally = last_tally[0]
    if tally is None:
        raise ValueError("explain: the function is neither prefill nor decode")
    choice = tally.choice
    return {"problem": tally.problem, **choice._asdict(), "module": choice.module.__name__}
