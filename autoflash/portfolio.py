"""The portfolio: the few configs that serve a group of problems at the least measured loss."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoflash.config import Config
from autoflash.problem import Problem
from autoflash.runtime.match import match_distance, match_serves, match_sizes

# A further config must lower the group's mean loss by this much to be worth its place.
WORTH = 0.001
LOST, DEARER = 0.01, 9.0  # what a problem loses beyond the first counts so many times more


@dataclass(frozen=True)
class Served:
    """A problem, the portfolio's config for it, and what that loses against the best measured."""

    problem: Problem
    config: Config
    regret: float


@dataclass(frozen=True)
class Measured:
    """The times of one problem's configs in microseconds, its winner's too, and its weight."""

    problem: Problem
    winner: Config
    times: Mapping[Config, float]
    weight: float = 1.0
    default: Config | None = None

    def regret(self, config: Config) -> float:
        """The config's time over the best one's, minus one; infinite where it was not measured."""
        return self.times.get(config, float("inf")) / min(self.times.values()) - 1

    def known_regret(self, config: Config | None) -> float | None:
        """The same, None where it was not measured."""
        return None if config is None or config not in self.times else self.regret(config)


def choose_portfolio(group: Sequence[Measured], most: int) -> list[Served]:
    """Serve every problem of the group from at most `most` configs.

    Grown greedily: each step takes the config that lowers the weighted mean loss most, a config
    that serves problems none of the others can first. Then configs are exchanged for others while
    that lowers it further. Where `most` configs cannot serve every problem, those left over keep
    their own winners. Ties go to the smaller config.
    """
    if most < 1:
        raise ValueError(f"a portfolio of {most} configs serves nothing")
    losses = _Losses(group)
    chosen: list[int] = []
    cost = losses.of(chosen)
    while len(chosen) < min(most, len(losses.configs)):
        lower, best = min((losses.of([*chosen, each]), each) for each in losses.every)
        if chosen and cost[0] == lower[0] and cost[1] - lower[1] < WORTH:
            break
        chosen, cost = [*chosen, best], lower
    chosen = _exchanged(losses, chosen)
    configs = [losses.configs[each] for each in chosen]
    served = []
    for measured in group:
        config = min(configs, key=lambda config: (measured.regret(config), config))
        if measured.regret(config) == float("inf"):
            config = measured.winner
        served.append(Served(measured.problem, config, measured.regret(config)))
    return served


@dataclass(frozen=True)
class Unseen:
    """What a problem loses that was not tuned, by the `nearest` one's config and by the default.

    `distance` is that of the nearest, infinite where there is none. A loss is None where the
    problem has no time of what would serve it.
    """

    distance: float
    nearest: float | None
    default: float | None

    def regret(self, reach: float) -> float | None:
        return self.nearest if self.distance < reach else self.default


def unseen(
    group: Sequence[Measured], most: int, valid: Callable[[Problem, Config], bool]
) -> list[Unseen]:
    """What each problem would lose had it not been tuned: leave one out.

    The others' portfolio serves it as the exported module does, by the nearest whose config is
    `valid` for it, or by the default. Its own times are not used to choose.
    """
    return [_unseen(measured, group, most, valid) for measured in group]


def reach_of(several: Sequence[Unseen]) -> float:
    """The distance from which on the default loses less than the nearest, on average.

    Infinite where it does not lose less by what a config must be worth.
    """
    both = [one for one in several if one.nearest is not None and one.default is not None]

    def loss(reach: float) -> float:
        regrets = [one.regret(reach) or 0.0 for one in both]
        return float(np.mean(np.log1p(regrets))) if both else 0.0

    farthest_first = sorted({one.distance for one in both if one.distance}, reverse=True)
    best = min(farthest_first, key=loss, default=float("inf"))
    return best if loss(best) + WORTH < loss(float("inf")) else float("inf")


def _unseen(
    left_out: Measured,
    group: Sequence[Measured],
    most: int,
    valid: Callable[[Problem, Config], bool],
) -> Unseen:
    others = [measured for measured in group if measured.problem != left_out.problem]
    sizes = match_sizes(left_out.problem)
    nearest: tuple[float, Problem, Config] | None = None
    for served in choose_portfolio(others, most) if others else []:
        tuned, knobs = match_sizes(served.problem), dict(served.config.knobs)
        distance = match_distance(sizes, tuned)
        if distance is None or not match_serves(left_out.problem, tuned, knobs):
            continue
        if not valid(left_out.problem, served.config):
            continue
        if nearest is None or (distance, served.problem) < nearest[:2]:
            nearest = (distance, served.problem, served.config)
    distance = nearest[0] if nearest else float("inf")
    by_nearest = left_out.known_regret(nearest[2] if nearest else None)
    return Unseen(distance, by_nearest, left_out.known_regret(left_out.default))


def _exchanged(losses: "_Losses", chosen: list[int]) -> list[int]:
    """The same number of configs, none of which a single other one would better replace."""
    while True:
        others = [
            [*chosen[:place], each, *chosen[place + 1 :]]
            for place in range(len(chosen))
            for each in losses.every
        ]
        best = min(others, key=losses.of)
        if losses.of(best) >= losses.of(chosen):
            return chosen
        chosen = best


class _Losses:
    """What each problem of a group loses by each of `configs`, sorted, of which `every` are."""

    def __init__(self, group: Sequence[Measured]) -> None:
        found = {config for measured in group for config in measured.times}
        self.configs = sorted(found | {measured.winner for measured in group})
        self.every = range(len(self.configs))
        regrets = np.full((len(group), len(self.configs)), np.inf)
        place = {config: number for number, config in enumerate(self.configs)}
        for row, measured in enumerate(group):
            for config, us in measured.times.items():
                regrets[row, place[config]] = us / min(measured.times.values())
        lost = np.log(regrets)  # 0 for the best, infinite for what was not measured
        self._lost = lost + DEARER * np.maximum(lost - np.log(1 + LOST), 0.0)
        self._weights = np.array([measured.weight for measured in group])

    def of(self, chosen: Sequence[int]) -> tuple[int, float]:
        """Problems that none of the `chosen` serves, and the weighted mean loss of the others."""
        if not chosen:
            return len(self._weights), 0.0
        lost = self._lost[:, list(chosen)].min(axis=1)
        served = np.isfinite(lost)
        weights = self._weights[served]
        mean = float((weights * lost[served]).sum() / (weights.sum() or 1.0))
        return int((~served).sum()), mean
