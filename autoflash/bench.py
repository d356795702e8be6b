"""Bench: the timing protocol. CUDA graphs of calls over rotating buffers; microseconds per call."""

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from autoflash.records import Clocks

GRAPH_CALLS = 10  # a graph of fewer calls would time its own launch
CACHE_MULTIPLE = 2  # rotating buffers together exceed the last-level cache this many times
MOST_SETS = 512  # tiny problems: more buffers than this take longer to make than to time
MEMORY_SHARE = 0.6  # of the free memory that the buffers of one problem may take
SAMPLE_US = 400.0  # shorter samples are made of several replays
# Clocks the GPU is kept busy while the host queues what is timed: 50 us for the launch of a graph
# or of bound kernels; half a millisecond for a call of triton's, which took the host up to 300 us
# beside an H200. Where the host may have been later than that, four times as long.
GRAPH_LEAD_CYCLES, CALL_LEAD_CYCLES = 100_000, 1_000_000
BOUND_AGAIN_CYCLES, PATIENT_LEAD_CYCLES = 4 * GRAPH_LEAD_CYCLES, 4 * CALL_LEAD_CYCLES
EAGER_GROUPS = 5


@dataclass(frozen=True)
class Timing:
    """Samples of one candidate, each the mean of its calls. `dropped`: hopeless after one call."""

    samples_us: tuple[float, ...]
    clocks: Clocks
    dropped: bool = False


@dataclass(frozen=True)
class Pace:
    """How long a contender runs when it is its turn, in microseconds: untimed, then timed.

    In a search, what is not led may be timed for less.
    """

    lead_us: float
    timed_us: float


def sets_needed(set_bytes: int, l2_bytes: int, free_bytes: int) -> int:
    """How many sets of buffers to rotate through, at least 2 where memory allows, else 1."""
    cold = max(2, math.ceil(CACHE_MULTIPLE * l2_bytes / max(set_bytes, 1)) + 1)
    fitting = int(MEMORY_SHARE * free_bytes / max(set_bytes, 1))
    return max(1, min(cold, fitting, MOST_SETS))


def calls_in_graph(call_us: float, sets: int, cap_us: float) -> int:
    """Once through all sets and at least ten calls, unless that takes longer than the cap."""
    return max(1, min(max(GRAPH_CALLS, sets), int(cap_us / max(call_us, 0.1))))


def graph_cap_us(cap_us: float, samples: int) -> float:
    """The GPU time of a graph of which so many samples, and one to warm up, take `cap_us`."""
    return max(cap_us / (samples + 1), SAMPLE_US)


class GpuClock:
    """For how long the GPU of this process was at work, by events around what it was given."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """The body counts from its first launch to its last, the host's gaps between them too."""
        start = _recorded_event()
        yield
        self.seconds += _elapsed_us(start, _recorded_event()) / 1e6


GPU_CLOCK = GpuClock()  # a process has one GPU


def event_us(work: Callable[[], None], lead_cycles: int = CALL_LEAD_CYCLES) -> float:
    """GPU time of `work`, which the host queues while the GPU waits `lead_cycles`."""
    return events_us([work], lead_cycles)[0]


def events_us(
    works: Sequence[Callable[[], None]],
    lead_cycles: int,
    meanwhile: Callable[[], None] = lambda: None,
) -> list[float]:
    """GPU time of each, one right after another; the host does `meanwhile` while the GPU works."""
    torch.cuda._sleep(lead_cycles)
    events = [_recorded_event()]
    for work in works:
        work()
        events.append(_recorded_event())
    meanwhile()
    taken = [_elapsed_us(*pair) for pair in itertools.pairwise(events)]
    GPU_CLOCK.seconds += sum(taken) / 1e6
    return taken


def _recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _elapsed_us(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    end.synchronize()
    return start.elapsed_time(end) * 1e3


class CallGraph:
    """A CUDA graph of `calls` calls: `call(i)` launches call i, on buffers of its choice."""

    def __init__(self, call: Callable[[int], None], calls: int) -> None:
        self.calls = calls
        self._graph = torch.cuda.CUDAGraph()
        # torch.cuda.graph() would collect garbage and empty the allocator's cache at every capture
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._graph.capture_begin(capture_error_mode="thread_local")
            try:
                for i in range(calls):
                    call(i)
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the first error is the one to tell
                    self._graph.capture_end()
                raise
            self._graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)

    def replay(self) -> None:
        self._graph.replay()

    def sample(self, replays: int = 1) -> float:
        """Microseconds per call over some replays, one after another."""
        return sampled([Replays(self, replays)])[0]


@dataclass(frozen=True)
class Replays:
    """How a graph is sampled: replayed `lead` times untimed, then `replays` times."""

    graph: CallGraph
    replays: int
    lead: int = 0

    @classmethod
    def of(cls, graph: CallGraph, call_us: float, led: Pace | None = None) -> Self:
        """As many as make a sample long enough to be told from noise, or as a pace wants."""
        graph_us = max(call_us * graph.calls, 1.0)
        if led is None:
            return cls(graph, replays_for(graph_us))
        replays = max(1, round(led.timed_us / graph_us))
        return cls(graph, replays, math.ceil(led.lead_us / graph_us))


def sampled(graphs: Sequence[Replays], meanwhile: Callable[[], None] = lambda: None) -> list[float]:
    """A sample of each, in microseconds per call, with no pause between them."""

    def replaying(graph: CallGraph, replays: int) -> Callable[[], None]:
        def work() -> None:
            for _ in range(replays):
                graph.replay()

        return work

    works = [replaying(each.graph, n) for each in graphs for n in (each.lead, each.replays)]
    timed = events_us(works, GRAPH_LEAD_CYCLES, meanwhile)[1::2]
    return [us / (each.replays * each.graph.calls) for us, each in zip(timed, graphs, strict=True)]


def replays_for(graph_us: float) -> int:
    """Replays that make a sample long enough to be told from noise."""
    return max(1, min(20, math.ceil(SAMPLE_US / graph_us)))


def eager_samples(call: Callable[[int], None], calls: int) -> tuple[float, ...]:
    """Wall-clock microseconds per call with the host's launches in it, in groups of calls."""
    groups = min(EAGER_GROUPS, calls)
    each = calls // groups
    samples = []
    for group in range(groups):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for i in range(each):
            call(group * each + i)
        torch.cuda.synchronize()
        samples.append((time.perf_counter() - start) * 1e6 / each)
    return tuple(samples)
