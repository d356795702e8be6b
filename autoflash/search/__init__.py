"""Strategies: functions that say which candidates to try next, given what was measured."""

from collections.abc import Callable, Generator, Mapping, Sequence

from autoflash.config import Config
from autoflash.errors import AutoflashError
from autoflash.search.exhaustive import exhaustive
from autoflash.search.hill_climb import hill_climb, neighbours
from autoflash.search.promising import promising
from autoflash.search.random import random

# Yields batches of configs to try and is sent the microseconds of those that were right.
Proposals = Generator[list[Config], Mapping[Config, float], None]
# (candidates in order of promise but the default first, most to try, seed, how many of the first
# candidates are known to be good) -> proposals
Strategy = Callable[[Sequence[Config], int, int, int], Proposals]

STRATEGIES: dict[str, Strategy] = {
    "exhaustive": exhaustive,
    "promising": promising,
    "hill_climb": hill_climb,
    "random": random,
}
EXHAUSTIVE_UP_TO = 200  # candidates; above, trying all of them does not pay
# Trials from which on a climb is worth its waiting: what a step tries is known, and compiled, only
# after the step before, and of fewer trials a GPU makes each step faster than a compiler.
CLIMB_FROM = 50

__all__ = [
    "CLIMB_FROM",
    "EXHAUSTIVE_UP_TO",
    "STRATEGIES",
    "Proposals",
    "Strategy",
    "likely_next",
    "strategy_for",
]


def strategy_for(name: str, candidates: int, most: int) -> Strategy:
    """The strategy of this name; `auto` tries all of up to 200 candidates, else climbs.

    Where `most` is small it tries the most promising instead. Raises AutoflashError naming the
    known ones.
    """
    if name == "auto":
        if candidates <= min(EXHAUSTIVE_UP_TO, most):
            return exhaustive
        return hill_climb if most >= CLIMB_FROM else promising
    if name not in STRATEGIES:
        known = ", ".join(["auto", *STRATEGIES])
        raise AutoflashError(f"no strategy is called {name!r}; known are {known}")
    return STRATEGIES[name]


def likely_next(
    name: str, most: int, best: Config, candidates: Sequence[Config]
) -> Sequence[Config]:
    """What the strategy may propose next if `best` stays the best: worth compiling already."""
    climbs = strategy_for(name, len(candidates), most) is hill_climb
    return neighbours(best, candidates) if climbs else ()
