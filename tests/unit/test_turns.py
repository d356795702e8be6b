"""Timing in turn: who is when whose neighbour, which rounds count, how long a turn is."""

import math
from itertools import pairwise

import pytest
import torch

from autoflash import turns
from autoflash.errors import DeviceError
from autoflash.records import Clocks
from autoflash.telemetry import BRAKES


class FakeBurst:
    """Takes as many microseconds a call as it was sampled before."""

    regime = "graph"

    def __init__(self, log: list, name: str, turn_us: float = 200.0) -> None:
        self.log, self.name, self.turn_us, self.samples = log, name, turn_us, 0

    def sample(self, clocks):
        self.log.append(self.name)
        self.samples += 1
        return float(self.samples), clocks()


def test_everyone_begins_a_round_and_follows_each_neighbour():
    orders = [turns.turns("abc", number) for number in range(6)]
    assert {order[0] for order in orders} == set("abc")
    followed = {pair for order in orders for pair in pairwise(order)}
    assert {("a", "b"), ("b", "a"), ("b", "c"), ("c", "b"), ("c", "a"), ("a", "c")} <= followed
    assert all(sorted(order) == list("abc") for order in orders)


def test_the_first_rounds_and_those_of_a_slowed_card_count_for_nobody():
    log = []
    bursts = {name: FakeBurst(log, name) for name in "ab"}
    reasons = iter([0] * 4 + [BRAKES & 0x20] + [0] * 100)
    times = turns.take_turns(bursts, 5, lambda: Clocks(1500, throttle_reasons=next(reasons)))
    assert turns.HEATING_ROUNDS == 1
    # round 1 heats the card; 2 counts, 3 is slowed for one of the two, 4 to 7 count
    assert times["a"].samples_us == times["b"].samples_us == [2, 4, 5, 6, 7]
    assert (times["a"].median_us, times["a"].sm_clock_mhz) == (5, 1500)


def test_a_card_that_is_always_slowed_gives_no_times():
    slowed = Clocks(throttle_reasons=BRAKES & 0x40)
    with pytest.raises(DeviceError, match="slowed by heat or power in all but 0 rounds"):
        turns.take_turns({"a": FakeBurst([], "a")}, 5, lambda: slowed)


def test_long_turns_have_fewer_rounds_but_never_too_few_to_take_a_median_of():
    def rounds(turn_us: float, gpu_us: float) -> int:
        bursts = [FakeBurst([], name, turn_us) for name in "ab"]
        return turns.rounds_of(bursts, gpu_us)

    assert rounds(turn_us=16_000, gpu_us=130_000) == 8
    assert rounds(turn_us=1e6, gpu_us=130_000) == turns.FEWEST_ROUNDS
    assert rounds(turn_us=16_000, gpu_us=math.inf) == turns.ROUNDS


def test_a_turn_is_many_short_calls_or_a_few_long_ones():
    assert turns.launches_of(100.0) == turns.GRAPH_US / 100.0
    assert turns.launches_of(50_000.0) == 1
    assert turns.launches_of(0.0) == turns.MOST_LAUNCHES
    assert turns.replays_of(turns.STEADY.timed_us, 100 * 80.0) == 3
    assert turns.replays_of(turns.STEADY.timed_us, 90_000.0) == 1


@pytest.mark.parametrize("behind", [False, True])
def test_calls_that_no_graph_captures_are_timed_alike(monkeypatch, behind):
    """Behind a wait, all of them, where the host does not stay ahead of one."""

    def queued(calls, pace):
        if behind and calls == ["b"]:
            raise DeviceError("the host queues a call in 30 us")
        return "queued", calls

    monkeypatch.setattr(turns, "QueuedBurst", queued)
    monkeypatch.setattr(turns, "StreamBurst", lambda calls, us: ("waits", calls))
    monkeypatch.setattr(turns, "event_us", lambda call: 10.0)
    found = turns.queued({"a": ["a"], "b": ["b"]}, turns.STEADY)
    kind = "waits" if behind else "queued"
    assert found == {"a": (kind, ["a"]), "b": (kind, ["b"])}


@pytest.mark.parametrize(("host_us", "ahead"), [(1e-6, True), (90.0, False)])
def test_a_burst_is_queued_by_a_host_that_stays_ahead(monkeypatch, host_us, ahead):
    clock, made = [0.0], []

    def call():
        made.append(0)
        clock[0] += host_us / 1e6

    monkeypatch.setattr(turns, "event_us", lambda call: 100.0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(turns.time, "perf_counter", lambda: clock[0])
    pace = turns.Pace(1000.0, 500.0)
    if ahead:
        assert turns.QueuedBurst([call], pace).turn_us == 1500.0 and len(made) == 5
    else:
        with pytest.raises(DeviceError, match="the host queues a call in 90 us"):
            turns.QueuedBurst([call], pace)
