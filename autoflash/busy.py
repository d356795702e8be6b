"""Busy: for how long a GPU and its process were at work, checks and preparing counted."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Busy:
    """Calls of one GPU's process, by the parent's clock: `first` begun, `last` ended.

    `seconds` is for how long the process worked, `gpu_seconds` the GPU by its own events.
    """

    seconds: float = 0.0
    gpu_seconds: float = 0.0
    first: float = float("inf")
    last: float = float("-inf")

    def add(
        self, began: float, ended: float, gpu_seconds: float, seconds: float | None = None
    ) -> None:
        """A call; without `seconds` the process worked as long as it was waited for."""
        self.seconds += ended - began if seconds is None else seconds
        self.gpu_seconds += gpu_seconds
        self.first, self.last = min(self.first, began), max(self.last, ended)


@dataclass(frozen=True)
class Shares:
    """Of the time from the first call to the last: of the GPUs, and of their processes.

    What is missing to 1 in `processes` was spent waiting: for a compiler, for the database, for a
    new process. What is less in `gpus` the processes spent without the GPU: planning, capturing
    graphs, loading kernels.
    """

    gpus: float
    processes: float


def shares_of(of_gpus: Sequence[Busy]) -> Shares | None:
    """The shares over all GPUs, None where there was no call."""
    worked = [busy for busy in of_gpus if busy.seconds > 0]
    if not worked:
        return None
    span = max(busy.last for busy in worked) - min(busy.first for busy in worked)
    total = span * len(worked)
    return Shares(
        gpus=min(1.0, sum(busy.gpu_seconds for busy in worked) / total),
        processes=min(1.0, sum(busy.seconds for busy in worked) / total),
    )
