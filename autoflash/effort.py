"""Effort: how much a search tries and how often it measures; TimeLimit: when it must end."""

import time
from dataclasses import dataclass

from autoflash.errors import AutoflashError


@dataclass(frozen=True)
class Effort:
    """`max_candidates` are tried on the first shape of a group, `max_climbed` on the others.

    `rungs` are the samples of each successive screening: on the first one every candidate's, alone,
    on a higher one those of the fastest, in turn.

    All samples of a candidate on the first rung, and its `eager_calls` after a final, are cut to
    `first_cap_us` of GPU time, those of a higher rung to `cap_us`; each sample of a higher rung, of
    finals and of cross timing to `sample_cap_us`. At least one launch is made. A final of `rounds`
    goes on for up to `prolonged_s` where it leaves open what it was held for. One of `led_rounds`,
    each sample of which lasts `led_us` and comes after `lead_us` of the config itself, does so for
    `led_longer_s`.
    """

    name: str
    max_candidates: int
    max_climbed: int
    rungs: tuple[int, ...]
    finalists: int
    rounds: int
    cross_rounds: int
    cross_candidates: int
    eager_calls: int = 100
    cap_us: float = 100_000.0
    first_cap_us: float = 25_000.0
    sample_cap_us: float = 10_000.0
    led_rounds: int = 3
    lead_us: float = 35_000.0
    led_us: float = 50_000.0
    prolonged_s: float = 2.0
    led_longer_s: float = 3.0

    def samples(self, rung: int, us: float) -> int:
        """Of a candidate on a rung, where a call takes so long; at least one."""
        if rung >= len(self.rungs):
            return self.samples(len(self.rungs) - 1, us)
        cap_us = self.first_cap_us if rung == 0 else self.cap_us
        return max(1, min(self.rungs[rung], int(cap_us / max(us, 0.1))))

    def reached(self, rung: int, samples: int, us: float) -> bool:
        """Whether so many are a higher rung's, or the rung below it already has as many."""
        below = self.samples(rung - 1, us)
        return samples > below or self.samples(rung, us) <= below


EFFORTS = {
    effort.name: effort
    for effort in (
        Effort("quick", 32, 16, (3,), 3, 7, 0, 0, prolonged_s=0.5, led_longer_s=1.0),
        Effort("standard", 200, 64, (5, 8), 6, 11, 3, 12),
        Effort(
            "max",
            100_000,
            100_000,
            (5, 16, 64, 256),
            10,
            31,
            7,
            32,
            prolonged_s=30.0,
            led_longer_s=30.0,
        ),
    )
}


def effort_of(name: str) -> Effort:
    """The effort of this name. Raises AutoflashError naming the known ones."""
    if name not in EFFORTS:
        raise AutoflashError(f"no effort is called {name!r}; known are {', '.join(EFFORTS)}")
    return EFFORTS[name]


class TimeLimit:
    """A hard end in wall-clock time; `None` seconds is no end. `cut` says it shortened a search."""

    def __init__(self, seconds: float | None) -> None:
        self.cut = False
        self.started = time.monotonic()
        self._end = float("inf") if seconds is None else self.started + seconds

    @property
    def finite(self) -> bool:
        return self._end != float("inf")

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started

    @property
    def left_s(self) -> float:
        return self._end - time.monotonic()

    @property
    def over(self) -> bool:
        return self.left_s <= 0

    def at_most(self, seconds: float) -> "TimeLimit":
        """A limit that ends in so many seconds, or when this one does."""
        limit = TimeLimit(seconds)
        limit._end = min(self._end, limit._end)
        return limit

    def share(self, parts: float) -> "TimeLimit":
        """A limit that ends after one of `parts` equal shares of what is left."""
        limit = TimeLimit(None)
        limit._end = min(self._end, limit.started + max(self.left_s, 0.0) / max(parts, 1.0))
        return limit
