"""Replay: a strategy run on a recorded table, as if on the GPU that it was measured on."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from statistics import mean

import numpy as np
from numpy.typing import NDArray

from autoflash.config import Config
from autoflash.search import STRATEGIES, Strategy
from autoflash.search.recorded import Recorded


@dataclass(frozen=True)
class Compared:
    """What a strategy found with so many trials: shares of replays, and the worst loss of all."""

    strategy: str
    trials: int
    within_1_percent: float
    within_5_percent: float
    worst: float


Order = Callable[[Recorded], Sequence[Config]]  # a table's configs as a strategy is given them


def default_first(recorded: Recorded) -> list[Config]:
    """The default, and no word on which of the others are better."""
    return _first(recorded, recorded.default)


def slowest_first(recorded: Recorded) -> list[Config]:
    """As if nothing were known."""
    return _first(recorded, max(recorded.timed, key=lambda c: recorded.timed[c].median_us))


def compared(
    table: Sequence[Recorded],
    strategy: str,
    trials: Iterable[int],
    seeds: Sequence[int],
    order: Order = default_first,
) -> list[Compared]:
    """A row for each number of trials, over every problem and seed.

    The loss is that of the best config tried, by its recorded time.
    """
    rows = []
    for most in trials:
        losses = []
        for recorded in table:
            ordered = order(recorded)
            for seed in seeds:
                tried = replay(recorded, STRATEGIES[strategy], most, seed, ordered)
                losses.append(min(recorded.loss(config) for config in tried))
        within_1, within_5 = (mean(loss <= share for loss in losses) for share in (0.01, 0.05))
        rows.append(Compared(strategy, most, within_1, within_5, max(losses)))
    return rows


def replay(
    recorded: Recorded,
    strategy: Strategy,
    most: int,
    seed: int,
    candidates: Sequence[Config] = (),
    starts: int = 1,
) -> list[Config]:
    """The configs a strategy tries, in order; what it is told is drawn anew from the table.

    `candidates` are the table's configs in another order than the table's.
    """
    random = Random(f"{seed} {recorded.problem}")
    tried: dict[Config, float] = {}
    proposals = strategy(candidates or list(recorded.timed), most, seed, starts)
    batch = next(proposals)
    while batch:
        for config in batch:
            if config not in tried:
                tried[config] = recorded.timed[config].draw(random, 1)[0]
        try:
            batch = proposals.send(tried)
        except StopIteration:
            break
    return list(tried)


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's: 1 where both have the same order, 0 where one says nothing of the other's."""
    return float(np.corrcoef(_ranks(a), _ranks(b))[0, 1])


def _ranks(values: Sequence[float]) -> NDArray[np.float64]:
    """Ranks from 0; equal values share the mean of theirs."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count + 1) / 2)[place]


def _first(recorded: Recorded, first: Config) -> list[Config]:
    return [first, *sorted(config for config in recorded.timed if config != first)]
