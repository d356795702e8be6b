"""Deciding: paired intervals, the tie set and the one deterministic choice among what was timed."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil

import numpy as np
from numpy.typing import NDArray

from autoflash.config import Config
from autoflash.problem import Problem
from autoflash.records import Decision, Resources, Trial

# What differs by less is a tie, however narrow the interval: three searches, each on an H200 of its
# own, told configs that near apart by 0.2 to 0.4 % more or less (median), one pair in twenty by 0.6
# to 1.6 %. What differs by more is none, however wide the interval.
TIE = 0.005
CONFIDENCE = 0.95
RESAMPLES = 1000
FEWEST_ROUNDS = 3  # fewer paired rounds say nothing about their spread


@dataclass(frozen=True)
class Interval:
    """One time over another, minus one, with its 95 % interval; above zero is slower."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Choice:
    """`margin` is the default's time over the winner's; `tied` does not hold the winner."""

    winner: Config
    margin: Interval
    tied: tuple[Config, ...]


def quantiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """Median, 20th and 80th percentile."""
    ordered = sorted(samples)  # numpy takes a third of a millisecond for that, and a GPU waits

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low, within = ordered[int(place)], place % 1
        return low + within * (ordered[ceil(place)] - low)

    return at(0.5), at(0.2), at(0.8)


def paired_interval(slower: Sequence[float], faster: Sequence[float]) -> Interval:
    """The median of `slower[i] / faster[i]` minus one, with its bootstrap interval over rounds.

    Samples of one index were taken in the same round, so the clock's drift cancels; the rounds that
    both were in count. The resampling is seeded: the same samples give the same interval.
    """
    ratios = _ratios(slower, faster)
    value = float(np.median(ratios)) - 1
    if len(ratios) < FEWEST_ROUNDS:
        return Interval(value, -1.0, max(1.0, value))
    ordered = np.sort(ratios[_drawn(len(ratios))], axis=1)  # np.median takes twice as long
    middle = (len(ratios) - 1) // 2, len(ratios) // 2
    medians = (ordered[:, middle[0]] + ordered[:, middle[1]]) / 2
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(medians, (tail, 1 - tail))
    return Interval(value, float(low) - 1, float(high) - 1)


@cache
def _drawn(rounds: int) -> NDArray[np.int64]:
    """The rounds of each resampling, with replacement."""
    return np.random.default_rng(0).integers(rounds, size=(RESAMPLES, rounds))


def unsettled(samples: Mapping[Config, Sequence[float]]) -> list[Config]:
    """The fastest and those that more rounds may tell from it; fewer than two are none.

    Settled is who is slower by more than a tie, and whose interval is no wider than a tie. Asking
    for width alone, not for a sign, leaves no choice to the moment at which one stops.
    """
    if len(samples) < 2:
        return []
    fastest = min(samples, key=lambda config: (statistics.median(samples[config]), config))
    found = [fastest]
    for config in samples:
        if config != fastest:
            interval = paired_interval(samples[config], samples[fastest])
            if interval.low <= TIE and interval.high - interval.low > TIE:
                found.append(config)
    return found if len(found) > 1 else []


def choose_by_rounds(
    samples: Mapping[Config, Sequence[float]],
    default: Config,
    resources: Mapping[Config, Resources],
    incumbent: Config | None = None,
) -> tuple[Choice, dict[Config, float]]:
    """The choice by paired intervals, and microseconds of each config; see `choose`.

    A time is the median of those in the most rounds, times the ratio to them in common rounds.
    """
    most = max(len(taken) for taken in samples.values())
    medians = {c: statistics.median(taken) for c, taken in samples.items() if len(taken) == most}
    beside = min(medians, key=lambda config: (medians[config], config))
    times = {
        config: medians[beside] * float(np.median(_ratios(taken, samples[beside])))
        for config, taken in samples.items()
    }

    @cache
    def interval(slower: Config, faster: Config) -> Interval:
        return paired_interval(samples[slower], samples[faster])

    return choose(times, interval, default, resources, incumbent), times


def spread_interval(slower: Trial, faster: Trial) -> Interval:
    """The same for trials that were not interleaved: each may lie anywhere from its p20 to p80."""
    median, p20, p80 = (slower.median_us, slower.p20_us, slower.p80_us)
    other, other_p20, other_p80 = (faster.median_us, faster.p20_us, faster.p80_us)
    assert median and p20 and p80 and other and other_p20 and other_p80, "a trial without times"
    return Interval(median / other - 1, p20 / other_p80 - 1, p80 / other_p20 - 1)


def choose(
    times: Mapping[Config, float],
    interval: Callable[[Config, Config], Interval],
    default: Config,
    resources: Mapping[Config, Resources],
    incumbent: Config | None = None,
) -> Choice:
    """The winner among `times`: the default unless it is clearly beaten.

    `interval(a, b)` is a's time over b's. Among those tied with the fastest and clearly faster
    than the default the `incumbent` stays, the winner of an earlier run; else the simplest is
    taken: fewer warps, fewer stages, less shared memory, then config order. A default that is not
    in `times` failed, and the fastest are compared alone.
    """
    fastest = min(times, key=lambda config: (times[config], config))

    def beats_default(config: Config) -> bool:
        return default not in times or interval(default, config).low > 0

    winner = default
    if beats_default(fastest):
        eligible = [c for c in times if c == fastest or is_tie(interval(c, fastest))]
        winner = min(
            (c for c in eligible if beats_default(c)),
            key=lambda c: (c != incumbent, _simplicity(c, resources)),
        )
    tied = tuple(sorted(c for c in times if c != winner and is_tie(interval(c, winner))))
    margin = interval(default, winner) if default in times else Interval(0.0, 0.0, 0.0)
    return Choice(winner, margin, tied)


def decision_of(
    problem: Problem,
    choice: Choice,
    times: Mapping[Config, float],
    default: Config,
    kernel_digest: str,
    also: Mapping[Config, float] | None = None,
) -> Decision:
    """The record of a choice; `also` are times of other shapes' finalists on this problem."""
    everything = {**(also or {}), **times}
    winner_us = times[choice.winner]
    ordered = sorted(everything.items(), key=lambda item: (item[1], item[0]))
    return Decision(
        problem=problem,
        kernel_digest=kernel_digest,
        winner=choice.winner,
        winner_us=winner_us,
        default=default,
        default_us=times.get(default, 0.0),
        margin=choice.margin.value,
        margin_low=choice.margin.low,
        margin_high=choice.margin.high,
        tied=choice.tied,
        times=tuple(ordered),
        regret=winner_us / min(times.values()) - 1,
    )


def overlapping(trials: Sequence[Trial], keep: int) -> list[Trial]:
    """The fastest trials: those whose p20..p80 reaches the fastest one's, at least `keep`."""
    ordered = sorted(trials, key=lambda trial: (trial.median_us, trial.config))
    if not ordered:
        return []
    bar = statistics.median((ordered[0].p80_us or 0.0, ordered[0].median_us or 0.0)) * (1 + TIE)
    near = [trial for trial in ordered if (trial.p20_us or 0.0) <= bar]
    return ordered[: max(keep, len(near))]


def _ratios(slower: Sequence[float], faster: Sequence[float]) -> NDArray[np.float64]:
    common = min(len(slower), len(faster))
    one, other = (np.asarray(taken[:common], dtype=np.float64) for taken in (slower, faster))
    return one / other


def is_tie(interval: Interval) -> bool:
    """Whether what differs so is as fast as one another."""
    return abs(interval.value) <= TIE


def _simplicity(config: Config, resources: Mapping[Config, Resources]) -> tuple[object, ...]:
    knobs = config.as_dict()
    smem = resources.get(config, Resources()).smem_bytes or 0
    return (knobs.get("num_warps", 0), knobs.get("num_stages", 0), smem, config)
