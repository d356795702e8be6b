"""Turns: contenders timed one after another, round by round, under CUDA graphs where they can.

A card's clock drifts with its heat, so what is compared is measured in turn.
"""

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from autoflash.bench import CallGraph, Pace, event_us
from autoflash.errors import DeviceError
from autoflash.records import Clocks
from autoflash.telemetry import BRAKES, Telemetry

MOST_LAUNCHES = 512  # in one graph
GRAPH_US = 8_000.0  # about what a graph takes
ROUNDS, FEWEST_ROUNDS = 31, 5
HEATING_ROUNDS = 1  # before those that count: the card comes from a pause
BRAKED_TRIES = 2  # rounds tried for each round wanted, where heat or power spoil some
LEAD_CLOCKS_HZ = 3e9  # faster than any GPU: so many cycles last longer than the host's second

Call = Callable[[], Any]


def buffer_sets(bytes_each: int, l2_bytes: int) -> int:
    """How many sets of inputs together exceed twice the last-level cache; at least two."""
    return min(64, max(2, -(-2 * l2_bytes // max(1, bytes_each)) + 1))


MOST_OF_HOST = 0.8  # of the GPU's time, within which a host queues calls that it stays ahead of

BRISK = Pace(8_000.0, 8_000.0)
# At its power cap a card takes a while to find a contender's clock. H200, turns of 8 ms: quartiles
# of the rounds lay 10 % apart, and contenders of half the power had the clocks of the others.
STEADY = Pace(50_000.0, 25_000.0)


@dataclass
class Times:
    """What one contender took. `regime` is "graph", or "stream" where it cannot be captured."""

    regime: str
    samples_us: list[float] = field(default_factory=list)  # a call, one of each round
    sm_clocks_mhz: list[int] = field(default_factory=list)  # while a burst ran, where NVML says

    @property
    def median_us(self) -> float:
        return statistics.median(self.samples_us)

    @property
    def spread_percent(self) -> float:
        """From the lower to the upper quartile of the samples, in percent of the median."""
        low, _, high = statistics.quantiles(self.samples_us, n=4)
        return 100 * (high - low) / self.median_us

    @property
    def sm_clock_mhz(self) -> int | None:
        return int(statistics.median(self.sm_clocks_mhz)) if self.sm_clocks_mhz else None


ReadClocks = Callable[[], Clocks]


class Burst(Protocol):
    """A contender ready to be timed: `sample` gives microseconds a call and the card's clocks.

    It takes about `turn_us`.
    """

    regime: str
    turn_us: float

    def sample(self, clocks: ReadClocks) -> tuple[float, Clocks]: ...


class GraphBurst:
    """A CUDA graph of about GRAPH_US, replayed untimed and then timed.

    Untimed, a contender finds the clocks and caches that it makes for itself, not its neighbour's.
    """

    regime = "graph"

    def __init__(self, calls: Sequence[Call], call_us: float, pace: Pace) -> None:
        self._launches = launches_of(call_us)
        graph_us = self._launches * call_us
        self._lead, self._timed = (replays_of(us, graph_us) for us in (pace.lead_us, pace.timed_us))
        self.turn_us = (self._lead + self._timed) * graph_us
        self._graph = CallGraph(lambda i: calls[i % len(calls)](), self._launches)

    def sample(self, clocks: ReadClocks) -> tuple[float, Clocks]:
        for _ in range(self._lead):
            self._graph.replay()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(self._timed):
            self._graph.replay()
        end.record()
        start.synchronize()
        read = clocks()  # while the timed replays run
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / (self._timed * self._launches), read


class StreamBurst:
    """The same calls queued one by one, behind a wait that is long enough for the host to do so."""

    regime = "stream"

    def __init__(self, calls: Sequence[Call], call_us: float) -> None:
        self._launches = launches_of(call_us)
        self._calls = calls
        self._queue()  # the first time costs the host more
        torch.cuda.synchronize()
        started = time.perf_counter()
        self._queue()
        host_s = time.perf_counter() - started
        self._lead_cycles = int(LEAD_CLOCKS_HZ * host_s)
        self.turn_us = 2e6 * host_s + self._launches * call_us
        torch.cuda.synchronize()

    def _queue(self) -> None:
        for i in range(self._launches):
            self._calls[i % len(self._calls)]()

    def sample(self, clocks: ReadClocks) -> tuple[float, Clocks]:
        return event_us(self._queue, self._lead_cycles) / self._launches, clocks()


class QueuedBurst:
    """Calls queued one by one, untimed first, of a host that stays ahead of the GPU.

    Autograd runs on the stream of the forward, which no graph captures. Raises DeviceError where
    the host does not stay ahead.
    """

    regime = "stream"

    def __init__(self, calls: Sequence[Call], pace: Pace) -> None:
        self._calls = calls
        call_us = min(event_us(call) for call in (list(calls) * 3)[:3])
        self._lead, self._timed = (
            max(1, round(us / call_us)) for us in (pace.lead_us, pace.timed_us)
        )
        self.turn_us = (self._lead + self._timed) * call_us
        torch.cuda.synchronize()
        started = time.perf_counter()
        self._queue(self._timed)
        host_us = 1e6 * (time.perf_counter() - started)
        torch.cuda.synchronize()
        if host_us > MOST_OF_HOST * self._timed * call_us:
            raise DeviceError(f"the host queues a call in {host_us / self._timed:.0f} us")

    def _queue(self, launches: int) -> None:
        for i in range(launches):
            self._calls[i % len(self._calls)]()

    def sample(self, clocks: ReadClocks) -> tuple[float, Clocks]:
        self._queue(self._lead)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self._queue(self._timed)
        end.record()
        read = clocks()  # while the timed calls run
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / self._timed, read


def launches_of(call_us: float) -> int:
    """Calls that make a graph."""
    return max(1, min(MOST_LAUNCHES, round(GRAPH_US / max(call_us, 0.1))))


def replays_of(wanted_us: float, graph_us: float) -> int:
    """Replays of a graph that take so long, at least one."""
    return max(1, round(wanted_us / graph_us))


def burst_of(calls: Sequence[Call], pace: Pace) -> Burst:
    """A graph of the calls, one call per set of rotating inputs; queued ones where none captures.

    The calls have been made before: whatever they compile is compiled.
    """
    call_us = min(event_us(calls[0]) for _ in range(3))
    try:
        burst = GraphBurst(calls, call_us, pace)
    except Exception as error:  # whatever a peer raises while it is captured
        print(f"not captured: {type(error).__name__}: {error}", file=sys.stderr)
        torch.cuda.synchronize()
        return StreamBurst(calls, call_us)
    burst.sample(Clocks)  # the first replay uploads the graph
    return burst


def queued(contenders: Mapping[str, Sequence[Call]], pace: Pace) -> dict[str, Burst]:
    """Bursts of calls that no graph captures, all of one kind.

    They are led by calls untimed, or behind a wait where the host is slower than someone's GPU.
    """
    try:
        return {name: QueuedBurst(calls, pace) for name, calls in contenders.items()}
    except DeviceError:
        found = {}
        for name, calls in contenders.items():
            call_us = min(event_us(calls[0]) for _ in range(3))
            found[name] = StreamBurst(calls, call_us)
        return found


def rounds_of(bursts: Sequence[Burst], gpu_us: float) -> int:
    """Rounds that give each contender about `gpu_us`, what is not timed counted."""
    each_us = statistics.mean(burst.turn_us for burst in bursts)
    return max(FEWEST_ROUNDS, int(min(ROUNDS, gpu_us / each_us)))


def turns(names: Sequence[str], number: int) -> list[str]:
    """The order of one round: everyone begins in turn, and neighbours change sides."""
    first = number // 2 % len(names)
    order = [*names[first:], *names[:first]]
    return order[::-1] if number % 2 else order


def take_turns(
    bursts: Mapping[str, Burst], rounds: int, clocks: ReadClocks = Clocks
) -> dict[str, Times]:
    """One sample of every contender a round; `clocks` is read while each burst runs.

    The first rounds heat the card and count for nobody, nor does one in which heat or the power
    supply slowed it.
    """
    times = {name: Times(burst.regime) for name, burst in bursts.items()}
    kept = 0
    for number in range(-HEATING_ROUNDS, BRAKED_TRIES * rounds):
        if kept == rounds:
            break
        row = {name: bursts[name].sample(clocks) for name in turns(list(bursts), number)}
        braked = any((read.throttle_reasons or 0) & BRAKES for _, read in row.values())
        if number < 0 or braked:
            continue
        kept += 1
        for name, (us, read) in row.items():
            times[name].samples_us.append(us)
            if read.sm_clock_mhz:
                times[name].sm_clocks_mhz.append(read.sm_clock_mhz)
    if kept < FEWEST_ROUNDS:
        raise DeviceError(f"the card was slowed by heat or power in all but {kept} rounds")
    return times


def interleaved(
    contenders: Mapping[str, Sequence[Call]],
    gpu_us: float = float("inf"),
    pace: Pace = BRISK,
    captured: bool = True,
) -> dict[str, Times]:
    """Times of each contender, all measured in turn; at most about `gpu_us` of GPU time each.

    A contender is one call per set of rotating inputs; its graph goes over them again and again.
    Calls that are not `captured`, as those of autograd, are queued one by one.
    """
    card = torch.cuda.get_device_properties(torch.cuda.current_device())
    telemetry = Telemetry(str(card.uuid))
    if captured:
        bursts = {name: burst_of(calls, pace) for name, calls in contenders.items()}
    else:
        bursts = queued(contenders, pace)
    return take_turns(bursts, rounds_of(list(bursts.values()), gpu_us), telemetry.clocks)
