"""The portfolio: the few configs that serve a group of problems at the least measured loss."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log

from autoflash.config import Config
from autoflash.problem import Problem
from autoflash.runtime.match import match_distance, match_sizes

# A further config must lower the group's mean regret by this much to be worth its place.
WORTH = 0.001


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


def choose_portfolio(group: Sequence[Measured], most: int) -> list[Served]:
    """Serve every problem of the group from at most `most` configs.

    Grown greedily: each step takes the config that lowers the weighted mean regret most, a config
    that serves problems none of the others can first. Where `most` configs cannot serve every
    problem, those left over keep their own winners. Ties go to the smaller config.
    """
    if most < 1:
        raise ValueError(f"a portfolio of {most} configs serves nothing")
    candidates = sorted({config for measured in group for config in measured.times})
    candidates = sorted({*candidates, *(measured.winner for measured in group)})
    chosen: list[Config] = []
    cost = _cost(group, chosen)
    while len(chosen) < min(most, len(candidates)):
        best = min(candidates, key=lambda config: (_cost(group, [*chosen, config]), config))
        lower = _cost(group, [*chosen, best])
        if chosen and cost[0] == lower[0] and cost[1] - lower[1] < WORTH:
            break
        chosen.append(best)
        cost = lower
    served = []
    for measured in group:
        config = min(chosen, key=lambda config: (measured.regret(config), config))
        if measured.regret(config) == float("inf"):
            config = measured.winner
        served.append(Served(measured.problem, config, measured.regret(config)))
    return served


def unseen_regrets(
    group: Sequence[Measured], most: int, valid: Callable[[Problem, Config], bool]
) -> list[float | None]:
    """What each problem would lose had it not been tuned: leave one out.

    The others' portfolio serves it as the exported module does, by the nearest whose config is
    `valid` for it, else by the default. None where it has no time of what would serve it. Its own
    times are not used to choose.
    """
    return [_unseen(measured, group, most, valid) for measured in group]


def _unseen(
    left_out: Measured,
    group: Sequence[Measured],
    most: int,
    valid: Callable[[Problem, Config], bool],
) -> float | None:
    others = [measured for measured in group if measured.problem != left_out.problem]
    sizes = match_sizes(left_out.problem)
    nearest: tuple[float, Problem, Config] | None = None
    for served in choose_portfolio(others, most) if others else []:
        distance = match_distance(sizes, match_sizes(served.problem))
        if distance is None or not valid(left_out.problem, served.config):
            continue
        if nearest is None or (distance, served.problem) < nearest[:2]:
            nearest = (distance, served.problem, served.config)
    config = nearest[2] if nearest else left_out.default
    if config is None or config not in left_out.times:
        return None
    return left_out.regret(config)


def _cost(group: Sequence[Measured], chosen: Sequence[Config]) -> tuple[int, float]:
    """Problems that none of `chosen` serves, and the weighted mean log of the others' slowdown."""
    regrets = [
        (min((m.regret(config) for config in chosen), default=float("inf")), m.weight)
        for m in group
    ]
    served = [(regret, weight) for regret, weight in regrets if regret < float("inf")]
    total = sum(weight for _, weight in served)
    mean = sum(weight * log(1 + max(regret, 0.0)) for regret, weight in served) / (total or 1.0)
    return len(regrets) - len(served), mean
