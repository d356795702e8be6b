"""Strategies: functions that say which candidates to try next, given what was measured."""

from collections.abc import Callable, Generator, Mapping, Sequence

from autoflash.config import Config
from autoflash.errors import AutoflashError
from autoflash.search.exhaustive import exhaustive
from autoflash.search.hill_climb import hill_climb
from autoflash.search.random import random

# Yields batches of configs to try and is sent the microseconds of those that were right.
Proposals = Generator[list[Config], Mapping[Config, float], None]
# (candidates in order of promise but the default first, most to try, seed, how many of the first
# candidates are known to be good) -> proposals
Strategy = Callable[[Sequence[Config], int, int, int], Proposals]

STRATEGIES: dict[str, Strategy] = {
    "exhaustive": exhaustive,
    "hill_climb": hill_climb,
    "random": random,
}
EXHAUSTIVE_UP_TO = 200  # candidates; above, trying all of them does not pay

__all__ = ["EXHAUSTIVE_UP_TO", "STRATEGIES", "Proposals", "Strategy", "strategy_for"]


def strategy_for(name: str, candidates: int, most: int) -> Strategy:
    """The strategy of this name; `auto` tries all of up to 200 candidates, else climbs.

    Raises AutoflashError naming the known ones.
    """
    if name == "auto":
        return exhaustive if candidates <= min(EXHAUSTIVE_UP_TO, most) else hill_climb
    if name not in STRATEGIES:
        known = ", ".join(["auto", *STRATEGIES])
        raise AutoflashError(f"no strategy is called {name!r}; known are {known}")
    return STRATEGIES[name]
