"""Busy: for how long the process of a GPU was at work, checks and preparing counted."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass
class Busy:
    """Calls of one GPU's process, by the parent's clock: `first` begun, `last` ended."""

    seconds: float = 0.0
    first: float = float("inf")
    last: float = float("-inf")

    def add(self, began: float, ended: float) -> None:
        self.seconds += ended - began
        self.first, self.last = min(self.first, began), max(self.last, ended)


def busy_share(of_gpus: Iterable[Busy]) -> float | None:
    """The share of the time from the first call to the last that the GPUs were at work.

    None where there was no call. What is missing to 1 was spent waiting: for a compiler, for the
    database, for a new process.
    """
    worked = [busy for busy in of_gpus if busy.seconds > 0]
    if not worked:
        return None
    span = max(busy.last for busy in worked) - min(busy.first for busy in worked)
    return min(1.0, sum(busy.seconds for busy in worked) / (span * len(worked)))
