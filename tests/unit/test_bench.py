"""The timing protocol's sums: how many buffers, calls, replays; what a sample may take."""

from types import SimpleNamespace

import pytest

from autoflash.bench import (
    GPU_CLOCK,
    GRAPH_CALLS,
    MOST_SETS,
    SAMPLE_US,
    Pace,
    Replays,
    calls_in_graph,
    eager_samples,
    event_us,
    graph_cap_us,
    replays_for,
    sets_needed,
)

MIB = 1 << 20


def test_rotating_buffers_exceed_twice_the_cache_where_memory_allows():
    assert sets_needed(10 * MIB, 60 * MIB, 1000 * MIB) * 10 > 2 * 60
    assert sets_needed(1000 * MIB, 60 * MIB, 10_000 * MIB) == 2
    assert sets_needed(1000 * MIB, 60 * MIB, 1200 * MIB) == 1
    assert sets_needed(1024, 60 * MIB, 10_000 * MIB) == MOST_SETS


def test_a_graph_goes_once_through_the_buffers_unless_that_exceeds_its_cap():
    assert calls_in_graph(10.0, 3, 4000.0) == GRAPH_CALLS
    assert calls_in_graph(10.0, 100, 4000.0) == 100
    assert calls_in_graph(1000.0, 3, 4000.0) == 4
    assert calls_in_graph(69_000.0, 2, 4000.0) == 1


@pytest.mark.parametrize("call_us", [3.0, 40.0, 900.0, 4000.0])
def test_all_samples_of_a_rung_and_one_to_warm_up_fit_its_cap(call_us):
    """Not one long sample, which would say nothing of its spread."""
    cap_us, samples = 25_000.0, 5
    calls = calls_in_graph(call_us, 31, graph_cap_us(cap_us, samples))
    sample_us = calls * call_us * replays_for(calls * call_us)
    assert (samples + 1) * sample_us <= cap_us * 1.01
    assert sample_us >= SAMPLE_US * 0.9


def test_a_graph_is_never_so_short_that_its_launch_would_count():
    assert graph_cap_us(100_000.0, 256) == SAMPLE_US


@pytest.mark.parametrize(("calls", "groups"), [(1, 1), (3, 3), (5, 5), (100, 5)])
def test_eager_samples_make_no_more_calls_than_they_may(monkeypatch, calls, groups):
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    made = []
    assert len(eager_samples(made.append, calls)) == groups
    assert made == list(range(calls))


class Event:
    """One of a GPU that works two milliseconds between any two."""

    made = 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        Event.made += 1
        self.at_ms = 2.0 * Event.made

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return end.at_ms - self.at_ms


def test_the_gpus_clock_counts_what_is_timed_and_whole_bodies_but_none_that_failed(monkeypatch):
    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda._sleep", lambda cycles: None)
    before_s = GPU_CLOCK.seconds
    assert event_us(lambda: None) == pytest.approx(2000.0)
    with GPU_CLOCK.counting():
        pass
    assert GPU_CLOCK.seconds - before_s == pytest.approx(0.004)
    with pytest.raises(ZeroDivisionError), GPU_CLOCK.counting():
        raise ZeroDivisionError
    assert GPU_CLOCK.seconds - before_s == pytest.approx(0.004)


def test_a_led_sample_is_as_long_as_its_pace_says_and_another_as_noise_wants():
    graph = SimpleNamespace(calls=10)
    led = Replays.of(graph, 350.0, Pace(35_000.0, 70_000.0))
    assert (led.lead, led.replays) == (10, 20)
    alone = Replays.of(graph, 10.0)
    assert (alone.lead, alone.replays) == (0, 4)
    assert Replays.of(graph, 50_000.0, Pace(35_000.0, 35_000.0)) == Replays(graph, 1, 1)
