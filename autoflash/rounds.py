"""Rounds: candidates sampled in turn, in random order each round.

What a card's clock does to one of them it does to all. But where products keep a card at its power
limit, those that take less power would be given the clock of those that take more: in finals of
long calls each sample is of a card that has run its own config for a while (`lead_us`).
"""

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autoflash.bench import Pace
from autoflash.child import Failure
from autoflash.config import Config
from autoflash.decision import quantiles, unsettled
from autoflash.effort import Effort, TimeLimit
from autoflash.entrants import Entrants, Lab
from autoflash.gpu import Gpu
from autoflash.problem import Problem
from autoflash.records import Clocks, Trial
from autoflash.roofline import floor
from autoflash.worker import Worker

BRAKED_TRIES = 2  # rounds tried for each round wanted, where heat or power spoil some
TOGETHER = 4  # rounds asked of a worker at once
PROLONGED = 7  # times at most that a final goes on, as long as it was, for those left unsettled
SHARPENED = 2  # times as many as finalists, at least, meet in turn before some of them are chosen
LONG_US = 400.0  # a call that lasts so long, and others beside it, finds a card at its power limit

Samples = dict[Config, list[float]]  # microseconds of each config, sample i from round i


def pace_of_final(problem: Problem, about_us: float, gpu: Gpu, effort: Effort) -> tuple[int, Pace]:
    """Rounds of a final in which a call takes `about_us`, and their pace."""
    if floor(problem, gpu).bound == "compute" and about_us >= LONG_US:
        return effort.led_rounds, Pace(effort.lead_us, effort.led_us)
    return effort.rounds, Pace(0.0, effort.sample_cap_us)


def finalists_of(problem: Problem, about_us: float, gpu: Gpu, effort: Effort) -> int:
    """How many are in a final; all that met in turn before where it has another pace than that."""
    _, pace = pace_of_final(problem, about_us, gpu, effort)
    return effort.finalists * (SHARPENED if pace.lead_us else 1)


def side_by_side(
    lab: Lab,
    entrants: Entrants,
    problem: Problem,
    configs: Sequence[Config],
    stage: str,
    about_us: float,
    limit: TimeLimit,
) -> Samples:
    """Microseconds per call of the configs that are and stay right, at the real size too.

    The worker must have prepared the problem, of which a call takes `about_us`. A round in which
    heat or the power supply slowed the card counts for nobody. A `final` goes on for those whom it
    leaves unsettled, for as long as the effort allows. Every config gets a trial of this stage,
    which is that or `cross`.
    """
    rounds, pace = lab.effort.cross_rounds, Pace(0.0, lab.effort.sample_cap_us)
    if stage == "final":
        rounds, pace = pace_of_final(problem, about_us, lab.gpu, lab.effort)
    entrants.wait_for(configs, limit)
    proven = [config for config in configs if entrants.prove(problem, config, stage)]
    entered = {}
    for config, after in zip(proven, [*proven[1:], None], strict=False):
        trial = _enter(lab, entrants, problem, config, stage, pace, after)
        if trial is not None:
            entered[config] = trial
    race = Race(lab, entrants, problem, stage, list(entered), pace)
    race.run(list(entered), rounds, limit)
    if stage == "final":
        longer_s = lab.effort.led_longer_s if pace.lead_us else lab.effort.prolonged_s
        _prolong(race, rounds, limit.at_most(longer_s))
    race.end(entered)
    return race.samples


def heat(
    lab: Lab,
    entrants: Entrants,
    problem: Problem,
    configs: Sequence[Config],
    rounds: int,
    limit: TimeLimit,
) -> list[Trial]:
    """Trials of the screening once more, in turn: alone, each found the card at another clock.

    The worker must have prepared the problem.
    """
    entered, pace = {}, Pace(0.0, lab.effort.sample_cap_us)
    for config in configs:
        started = time.monotonic()
        try:
            lab.worker.arm(config, pace)
        except Failure as failure:
            entrants.fail(problem, config, "screen", failure, time.monotonic() - started)
        else:
            seconds = time.monotonic() - started
            entered[config] = entrants.trial(problem, config, "screen", "correct", seconds)
    race = Race(lab, entrants, problem, "screen", list(entered), pace)
    race.run(list(entered), rounds, limit)
    return race.end(entered)


def with_times(trial: Trial, regime: str, samples: Sequence[float], clocks: Clocks) -> Trial:
    """The trial with what was timed."""
    median, p20, p80 = quantiles(samples)
    return replace(
        trial,
        regime=regime,
        median_us=median,
        p20_us=p20,
        p80_us=p80,
        samples=len(samples),
        clocks=clocks,
    )


def _enter(
    lab: Lab,
    entrants: Entrants,
    problem: Problem,
    config: Config,
    stage: str,
    pace: Pace,
    after: Config | None,
) -> Trial | None:
    """The config's trial, without times yet, once it is right at the real size and armed.

    `after` is who enters after it.
    """
    started = time.monotonic()
    try:
        verdict = lab.worker.check_full(config, lab.seed, pace)
        lab.worker.arm(config, pace, (after, lab.seed) if after else None)
    except Failure as failure:
        entrants.fail(problem, config, stage, failure, time.monotonic() - started)
        return None
    return entrants.trial(problem, config, stage, "correct", time.monotonic() - started, verdict)


class Race:
    """Armed configs sampled in turn, in random order each round; who fails is out."""

    def __init__(
        self,
        lab: Lab,
        entrants: Entrants,
        problem: Problem,
        stage: str,
        configs: list[Config],
        pace: Pace,
    ) -> None:
        self._lab, self._entrants = lab, entrants
        self._problem, self._stage, self._pace = problem, stage, pace
        self._order = random.Random(lab.seed)
        self.samples: Samples = {config: [] for config in configs}

    def run(self, configs: list[Config], rounds: int, limit: TimeLimit) -> list[Config]:
        """Those of the configs left after so many more rounds; nobody if there was no time."""
        wanted = rounds + max((len(self.samples[config]) for config in configs), default=0)
        left = BRAKED_TRIES * rounds
        while left and not limit.over and configs and len(self.samples[configs[0]]) < wanted:
            together = min(left, TOGETHER, wanted - len(self.samples[configs[0]]))
            left -= together
            drawn = [self._order.sample(configs, len(configs)) for _ in range(together)]
            self._rounds(drawn)
            configs = [config for config in configs if config in self.samples]
        return [config for config in configs if len(self.samples[config]) == wanted]

    def _rounds(self, orders: list[list[Config]]) -> None:
        started = time.monotonic()
        lab = self._lab
        rows, failed = rounds_of(lab.worker, orders, self._pace)
        for config, failure in failed.items():
            seconds = time.monotonic() - started
            self._entrants.fail(self._problem, config, self._stage, failure, seconds)
            del self.samples[config]
        for row in rows:
            for config, us in row.items():
                self.samples[config].append(us)

    def end(self, entered: Mapping[Config, Trial]) -> list[Trial]:
        """Their trials, recorded with what was sampled."""
        clocks = self._lab.worker.disarm()
        return [
            self._lab.journal.record(with_times(entered[config], "graph", taken, clocks))
            for config, taken in self.samples.items()
            if taken
        ]


def rounds_of(
    worker: Worker, orders: Sequence[Sequence[Config]], pace: Pace
) -> tuple[list[dict[Config, float]], dict[Config, Failure]]:
    """The samples of each round that heat and power let count, and those configs that failed.

    The armed configs run one right after another; where that fails, one round is made of each by
    itself, to find out whose fault it is.
    """
    try:
        taken = zip(orders, worker.sample(orders), strict=True)
        rows = [dict(zip(order, row, strict=True)) for order, (row, braked) in taken if not braked]
        return rows, {}
    except Failure:
        return _one_by_one(worker, orders[0], pace)


def _one_by_one(
    worker: Worker, configs: Sequence[Config], pace: Pace
) -> tuple[list[dict[Config, float]], dict[Config, Failure]]:
    row: dict[Config, float] = {}
    failed: dict[Config, Failure] = {}
    slowed = False
    for config in configs:
        try:
            worker.arm(config, pace)
            [((row[config],), braked)] = worker.sample([[config]])
            slowed |= braked
        except Failure as failure:
            failed[config] = failure
    return [] if slowed else [row], failed


def _prolong(race: Race, rounds: int, limit: TimeLimit) -> None:
    """More rounds for those whom the rounds so far leave unsettled, while there is time for all."""
    racing, took_s = list(race.samples), 0.0
    for _ in range(PROLONGED):
        if limit.over or took_s > limit.left_s:
            return
        taken = {config: race.samples[config] for config in racing}
        if all(taken.values()):  # heat or power may have spoiled every round so far
            racing = unsettled(taken)
        started = time.monotonic()
        racing = race.run(racing, rounds, limit)
        took_s = time.monotonic() - started
