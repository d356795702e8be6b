"""Deciding: paired intervals, ties, the default's right to stay, one choice for the same data."""

import random

import pytest

from autoflash.config import Config
from autoflash.decision import (
    Interval,
    choose,
    choose_by_rounds,
    decision_of,
    overlapping,
    paired_interval,
    quantiles,
    spread_interval,
    unsettled,
)
from autoflash.problem import Problem
from autoflash.records import Resources, Trial

PROBLEM = Problem("prefill", "bf16", 1, 4, 2, 64, 128, 128)


def config(num_warps=4, num_stages=2, block=64):
    knobs = {"BLOCK_M": block, "num_stages": num_stages, "num_warps": num_warps}
    return Config.of("prefill", knobs)


DEFAULT, OTHER, THIRD = config(8, 3), config(4, 2), config(4, 3)


def rounds(us, count=11, noise=0.001, seed=0):
    """Samples with a drift that all configs of a round share and noise that they do not."""
    drawn = random.Random(f"{us}{seed}")
    return [us * (1 + 0.02 * i) * (1 + drawn.uniform(-noise, noise)) for i in range(count)]


def chosen(samples, default=DEFAULT, resources=None):
    times = {c: sum(s) / len(s) for c, s in samples.items()}

    def interval(slower, faster):
        return paired_interval(samples[slower], samples[faster])

    return choose(times, interval, default, resources or {})


def trial(median, spread=0.0, used=DEFAULT, samples=5):
    return Trial(
        PROBLEM,
        used,
        "d",
        "correct",
        "screen",
        regime="graph",
        median_us=median,
        p20_us=median - spread,
        p80_us=median + spread,
        samples=samples,
    )


def test_quantiles_are_the_median_and_the_fifths():
    assert quantiles([5, 1, 3, 2, 4]) == (3.0, pytest.approx(1.8), pytest.approx(4.2))


def test_pairing_cancels_a_drift_that_is_larger_than_the_difference():
    slower, faster = rounds(101.0), rounds(100.0)
    assert max(faster) > max(slower[:6])  # unpaired, the times overlap widely
    interval = paired_interval(slower, faster)
    assert 0.008 < interval.low <= interval.value <= interval.high < 0.012


def test_the_same_samples_give_the_same_interval():
    assert paired_interval(rounds(3.0), rounds(2.0)) == paired_interval(rounds(3.0), rounds(2.0))


def test_two_rounds_say_nothing_about_their_spread():
    interval = paired_interval([2.0, 2.0], [1.0, 1.0])
    assert interval.value == 1.0 and interval.low == -1.0


def test_a_candidate_that_is_clearly_faster_wins():
    choice = chosen({DEFAULT: rounds(110.0), OTHER: rounds(100.0)})
    assert choice.winner == OTHER and choice.tied == ()
    assert 0.09 < choice.margin.low < choice.margin.high < 0.11


def test_the_default_stays_where_the_gain_is_within_the_interval():
    choice = chosen({DEFAULT: rounds(100.02, noise=0.002), OTHER: rounds(100.0, noise=0.002)})
    assert choice.winner == DEFAULT and choice.margin.value == 0.0
    assert choice.tied == (OTHER,)


def test_a_winner_is_never_slower_than_the_default():
    for seed in range(50):
        drawn = random.Random(seed)
        samples = {
            c: rounds(100 + drawn.uniform(-1, 1), noise=0.02, seed=seed)
            for c in (DEFAULT, OTHER, THIRD)
        }
        choice = chosen(samples)
        assert choice.winner == DEFAULT or choice.margin.low > 0


def test_of_two_tied_the_one_with_fewer_warps_then_stages_is_taken():
    many, few, fewest = config(8, 2), config(4, 3), config(4, 2)
    slow = config(2, 1)
    samples = {many: rounds(100.0), few: rounds(100.01), fewest: rounds(100.02), slow: rounds(120)}
    choice = chosen(samples, default=slow)
    assert choice.winner == fewest and choice.tied == tuple(sorted((many, few)))


def test_of_tied_with_equal_warps_and_stages_less_shared_memory_is_taken():
    small, large, slow = config(block=128), config(block=64), config(8)
    samples = {small: rounds(100.01), large: rounds(100.0), slow: rounds(120.0)}
    resources = {small: Resources(smem_bytes=1000), large: Resources(smem_bytes=2000)}
    assert chosen(samples, slow, resources).winner == small
    assert chosen(samples, slow).winner == large  # config order, where nothing else tells


def test_more_than_half_a_percent_is_no_tie_however_wide_the_interval():
    simple, fast, slow = config(2), config(8), config(8, 3)
    samples = {simple: rounds(101, noise=0.03), fast: rounds(100, noise=0.03), slow: rounds(150)}
    assert paired_interval(samples[simple], samples[fast]).low < 0
    assert chosen(samples, slow).winner == fast


def test_what_no_second_run_would_repeat_is_a_tie_however_narrow_the_interval():
    simple, fast, slow = config(2), config(8), config(8, 3)
    samples = {simple: rounds(100.4, noise=0.0001), fast: rounds(100, noise=0.0001)}
    samples[slow] = rounds(150)
    assert paired_interval(samples[simple], samples[fast]).low > 0
    assert chosen(samples, slow).winner == simple
    samples[simple] = rounds(100.6, noise=0.0001)
    assert chosen(samples, slow).winner == fast


def test_without_a_default_the_fastest_are_compared_alone():
    choice = chosen({OTHER: rounds(100.0), THIRD: rounds(90.0)})
    assert choice.winner == THIRD and choice.margin == Interval(0.0, 0.0, 0.0)


def test_times_that_were_not_interleaved_must_not_overlap():
    near, far = (
        spread_interval(trial(102, 2), trial(100, 2)),
        spread_interval(trial(120), trial(99)),
    )
    assert near.low < 0 < near.high
    assert far.low > 0


def test_a_decision_holds_every_time_fastest_first():
    times = {DEFAULT: 110.0, OTHER: 100.0}
    choice = chosen({DEFAULT: rounds(110.0), OTHER: rounds(100.0)})
    decision = decision_of(PROBLEM, choice, times, DEFAULT, "digest")
    assert decision.times == ((OTHER, 100.0), (DEFAULT, 110.0))
    assert (decision.winner_us, decision.default_us, decision.regret) == (100.0, 110.0, 0.0)
    assert decision.source == "measured"


def test_a_default_that_failed_has_no_time():
    choice = chosen({OTHER: rounds(100.0)})
    assert decision_of(PROBLEM, choice, {OTHER: 100.0}, DEFAULT, "digest").default_us == 0.0


def test_overlapping_keeps_those_within_reach_of_the_fastest():
    fast, near, far = trial(100, 2), trial(101, 2, OTHER), trial(130, 2, THIRD)
    assert overlapping([far, near, fast], 1) == [fast, near]
    assert overlapping([far, near, fast], 3) == [fast, near, far]
    assert overlapping([], 3) == []


def test_rounds_settle_who_is_slower_by_more_than_a_tie_and_whose_interval_is_narrow():
    samples = {
        DEFAULT: rounds(100.0),
        OTHER: rounds(100.2),  # narrow
        THIRD: rounds(103.0, noise=0.01),  # clearly slower
    }
    assert unsettled(samples) == []
    noisy = samples | {OTHER: rounds(100.2, noise=0.02, seed=5)}
    assert set(unsettled(noisy)) == {DEFAULT, OTHER}
    assert unsettled({}) == unsettled({DEFAULT: rounds(1.0)}) == []


def test_configs_of_fewer_rounds_are_compared_in_those_they_were_in():
    """The card became slower later on, which is no fault of those that stayed."""
    fast = rounds(100.0) + [2 * us for us in rounds(100.0)]
    slow = rounds(103.0)
    samples = {DEFAULT: slow, OTHER: fast, THIRD: [1.001 * us for us in fast]}
    choice, times = choose_by_rounds(samples, DEFAULT, {})
    assert choice.winner in (OTHER, THIRD) and choice.margin.value == pytest.approx(0.03, abs=0.003)
    assert times[DEFAULT] / times[OTHER] == pytest.approx(1.03, abs=0.003)
    assert times[OTHER] > 130  # the median of all its rounds


def test_among_those_tied_the_incumbent_stays_and_among_others_it_has_no_say():
    samples = {DEFAULT: rounds(120.0), OTHER: rounds(100.0), THIRD: rounds(100.05)}
    assert choose_by_rounds(samples, DEFAULT, {})[0].winner == OTHER  # of fewer stages
    assert choose_by_rounds(samples, DEFAULT, {}, THIRD)[0].winner == THIRD
    slower = samples | {THIRD: rounds(103.0)}
    assert choose_by_rounds(slower, DEFAULT, {}, THIRD)[0].winner == OTHER
    assert choose_by_rounds(slower, DEFAULT, {}, DEFAULT)[0].winner == OTHER
