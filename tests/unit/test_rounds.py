"""Rounds side by side: who has more of them, and who is out."""

from dataclasses import replace
from random import Random
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from fake_device import CLOCKS, GPU

from autoflash import worker as workers
from autoflash.child import Failure
from autoflash.config import Config
from autoflash.effort import EFFORTS, TimeLimit
from autoflash.problem import Problem
from autoflash.records import Trial
from autoflash.rounds import PROLONGED, side_by_side

PROBLEM = Problem("prefill", "bf16", 1, 4, 4, 128, 512, 512)
ONE, NEAR, FAR = (Config.of("prefill", {"BLOCK_M": block}) for block in (64, 128, 32))
EFFORT = EFFORTS["standard"]
ROUNDS = EFFORT.rounds


class Worker:
    """`times` and their relative noise; `dies` after so many samples; `braked` rounds at first."""

    def __init__(self, times, noise, dies=None, braked=0):
        self._times, self._noise, self._dies = times, noise, dict(dies or {})
        self._braked = braked
        self._random = Random(0)
        self.check_full = Mock()

    def arm(self, config, pace, after=None):
        pass

    def sample(self, rounds):
        taken = []
        for each in rounds:
            self._braked -= 1
            taken.append(([self._sample(config) for config in each], self._braked >= 0))
        return taken

    def _sample(self, config):
        if config in self._dies:
            self._dies[config] -= 1
            if self._dies[config] < 0:
                raise Failure("runtime", "planted")
        return self._times[config] * self._random.gauss(1, self._noise)

    def disarm(self):
        return CLOCKS


def raced(
    *, noise, stage="final", effort=EFFORT, times=None, problem=PROBLEM, us=100.0, limit=None, **how
):
    """The number of samples of each config; `how` the worker takes them."""
    times = times or {ONE: 100.0, NEAR: 100.7, FAR: 150.0}
    failed = Mock()
    entrants = SimpleNamespace(
        wait_for=Mock(),
        prove=Mock(return_value=True),
        fail=failed,
        trial=lambda problem, config, stage, *_: Trial(problem, config, "d", "correct", stage),
    )
    lab = SimpleNamespace(
        worker=Worker(times, noise, **how), journal=Mock(), gpu=GPU, effort=effort, seed=0
    )
    limit = limit or TimeLimit(None)
    samples = side_by_side(lab, entrants, problem, list(times), stage, us, limit)
    assert entrants.wait_for.call_args.args == (list(times), limit)
    return {config: len(taken) for config, taken in samples.items()}, failed


class Process:
    """A worker's process that notes every call and what it was told to go on with."""

    starts, pid = 1, 1

    def __init__(self, *_):
        self.calls = []

    def call(self, _, *asked, deadline_s, then=None):
        self.calls.append((asked, then and then[1]))
        sample = [([1.0] * len(each), False) for each in asked[1]] if asked[0] == "sample" else None
        return sample or CLOCKS, 0.0, 0.0


def test_between_the_finalists_the_process_goes_on_by_itself():
    worker = workers.Worker(Mock(), child=Process)
    entrants = SimpleNamespace(
        wait_for=Mock(),
        prove=Mock(return_value=True),
        trial=lambda problem, config, stage, *_: Trial(problem, config, "d", "correct", stage),
    )
    lab = SimpleNamespace(worker=worker, journal=Mock(), gpu=GPU, effort=EFFORT, seed=7)
    side_by_side(lab, entrants, PROBLEM, [ONE, FAR], "cross", 100.0, TimeLimit(None))
    calls = worker._child.calls
    assert [asked[0] for asked, _ in calls[:4]] == ["check_full", "arm"] * 2
    told = [then for _, then in calls]
    assert told[:3] == [asked for asked, _ in calls[1:4]] and told[3] is None


def test_a_final_that_noise_leaves_open_goes_on_for_those_it_concerns():
    counts, _ = raced(noise=0.01)
    assert counts[FAR] == ROUNDS
    assert ROUNDS < counts[ONE] == counts[NEAR] <= (1 + PROLONGED) * ROUNDS
    assert counts[ONE] % ROUNDS == 0


def test_a_final_that_tells_all_apart_is_not_prolonged():
    assert set(raced(noise=0.0005)[0].values()) == {ROUNDS}


def test_those_as_fast_as_one_another_tie_once_their_interval_is_narrow():
    counts, _ = raced(noise=0.0005, times={ONE: 100.0, NEAR: 100.0})
    assert set(counts.values()) == {ROUNDS}


def test_hopeless_noise_ends_a_final_all_the_same():
    counts, _ = raced(noise=0.3, times={ONE: 100.0, NEAR: 100.1})
    assert set(counts.values()) == {(1 + PROLONGED) * ROUNDS}


@pytest.mark.parametrize("us", [100.0, 1000.0])
def test_a_final_that_comes_when_the_time_is_over_has_no_samples(us):
    counts, failed = raced(noise=0.01, limit=TimeLimit(0.0), problem=LONGER, us=us)
    assert set(counts.values()) == {0} and not failed.called


def test_a_final_whose_first_rounds_are_all_spoiled_goes_on_for_everybody():
    spoiled = 2 * ROUNDS  # the most that are tried for so many
    assert set(raced(noise=0.0005, braked=spoiled)[0].values()) == {ROUNDS}


def test_cross_timing_and_an_effort_without_time_for_it_prolong_nothing():
    assert set(raced(noise=0.01, stage="cross")[0].values()) == {EFFORT.cross_rounds}
    hasty = replace(EFFORT, prolonged_s=0.0, led_longer_s=0.0)
    assert set(raced(noise=0.01, effort=hasty)[0].values()) == {ROUNDS}
    led = {"problem": LONGER, "us": 1000.0, "effort": hasty}
    assert set(raced(noise=0.01, **led)[0].values()) == {EFFORT.led_rounds}


@pytest.mark.parametrize("after", [3, ROUNDS + 3])
def test_one_that_fails_is_out_with_all_its_samples_whenever_it_does(after):
    counts, failed = raced(noise=0.01, dies={NEAR: after})
    assert set(counts) == {ONE, FAR} and counts[FAR] == ROUNDS
    assert [call.args[1] for call in failed.call_args_list] == [NEAR]


LONGER = replace(PROBLEM, seqlen_q=16384, seqlen_k=16384)
DECODE = Problem("decode", "bf16", 64, 32, 8, 128, 1, 8192)


# Products at full rate keep a card at its power limit; short calls and caches that are read do not.
@pytest.mark.parametrize(
    ("problem", "us", "stage", "led"),
    [
        (LONGER, 1000.0, "final", True),
        (LONGER, 1000.0, "cross", False),
        (LONGER, 100.0, "final", False),
        (DECODE, 1000.0, "final", False),
    ],
)
def test_samples_of_a_final_of_long_products_are_of_a_card_that_ran_the_same_before(
    problem, us, stage, led, monkeypatch
):
    armed = []
    monkeypatch.setattr(Worker, "arm", lambda _, *asked: armed.append(asked))
    counts, _ = raced(noise=0.0, stage=stage, problem=problem, us=us)
    rounds = {True: EFFORT.led_rounds, False: EFFORT.rounds}[led]
    assert set(counts.values()) == {rounds if stage == "final" else EFFORT.cross_rounds}
    assert {pace.lead_us for _, pace, _ in armed} == {EFFORT.lead_us if led else 0.0}
    assert {pace.timed_us for _, pace, _ in armed} == {
        EFFORT.led_us if led else EFFORT.sample_cap_us
    }
