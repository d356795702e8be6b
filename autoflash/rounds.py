"""Rounds: candidates checked at the real size, then sampled in turn, in random order each round."""

import random
import time
from collections.abc import Sequence
from dataclasses import replace

from autoflash.child import Failure
from autoflash.config import Config
from autoflash.decision import quantiles
from autoflash.effort import TimeLimit
from autoflash.entrants import Entrants, Lab
from autoflash.problem import Problem
from autoflash.records import Clocks, Trial

BRAKED_TRIES = 2  # rounds tried for each round wanted, where heat or power spoil some


def side_by_side(
    lab: Lab,
    entrants: Entrants,
    problem: Problem,
    configs: Sequence[Config],
    stage: str,
    rounds: int,
    limit: TimeLimit,
) -> dict[Config, list[float]]:
    """Microseconds per call of the configs that stay right, sample i of each from round i.

    The worker must have prepared the problem. A round in which heat or the power supply slowed the
    card counts for nobody. Every config gets a trial of this stage.
    """
    entrants.wait_for(configs, limit)
    entered = {}
    for config in configs:
        trial = _enter(lab, entrants, problem, config, stage)
        if trial is not None:
            entered[config] = trial
    samples = _sample(lab, entrants, problem, list(entered), stage, rounds, limit)
    clocks = lab.worker.disarm()
    for config, taken in samples.items():
        if taken:
            lab.journal.record(with_times(entered[config], "graph", taken, clocks))
    return samples


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
    lab: Lab, entrants: Entrants, problem: Problem, config: Config, stage: str
) -> Trial | None:
    """The config's trial, without times yet, once it is right at the real size and armed."""
    started = time.monotonic()
    try:
        verdict = lab.worker.check_full(config, lab.seed)
        effort = lab.effort
        lab.worker.arm(config, effort.final_cap_us if stage == "final" else effort.cross_cap_us)
    except Failure as failure:
        entrants.fail(problem, config, stage, failure, time.monotonic() - started)
        return None
    return entrants.trial(problem, config, stage, "correct", time.monotonic() - started, verdict)


def _sample(
    lab: Lab,
    entrants: Entrants,
    problem: Problem,
    configs: list[Config],
    stage: str,
    rounds: int,
    limit: TimeLimit,
) -> dict[Config, list[float]]:
    samples: dict[Config, list[float]] = {config: [] for config in configs}
    order = random.Random(lab.seed)
    for _ in range(BRAKED_TRIES * rounds):
        if limit.over or not samples or len(next(iter(samples.values()))) == rounds:
            break
        row: dict[Config, float] = {}
        braked = False
        for config in order.sample(list(samples), len(samples)):
            started = time.monotonic()
            try:
                row[config], slowed = lab.worker.sample(config)
                braked |= slowed
            except Failure as failure:
                entrants.fail(problem, config, stage, failure, time.monotonic() - started)
                del samples[config]
        if not braked:
            for config in samples:
                samples[config].append(row[config])
    return samples
