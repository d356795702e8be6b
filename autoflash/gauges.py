"""Gauges: what a call costs beside its GPU time: the host's time, launches, memory, its tail."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from autoflash.turns import Call

HOST_GROUPS, HOST_CALLS = 20, 10  # so few that the queue of launches is never full
TAIL_CALLS = 1000  # fewer say nothing of a 99th percentile
FEW_CALLS = 20  # where so many would take too long
FEWEST_CALLS = 5  # however long one takes


@dataclass(frozen=True)
class Gauged:
    """Of one contender's calls.

    `host_us` is what a call keeps the host, `eager_us` the median of calls that are waited for, one
    by one, and `p99_us` their 99th percentile, None where a thousand would take too long.
    `launches` are kernels, copies and fills. `temporary_bytes` is the most memory that was taken
    beyond the output.
    """

    host_us: float
    eager_us: float
    p99_us: float | None
    launches: int
    temporary_bytes: int


def gauged(contenders: Mapping[str, Sequence[Call]], seconds: float = 3.0) -> dict[str, Gauged]:
    """The gauges of each contender's calls on the current GPU, which have been made before.

    About twice so many seconds for each at most, but for calls of which few take longer. Launches
    are counted when no host's time is asked any more: a profiler may leave hooks behind, which
    every later launch passes.
    """
    timed: dict[str, tuple[float, float, float | None]] = {}
    for name, calls in contenders.items():
        waited = _waited_us(calls, seconds)
        tail = float(np.quantile(waited, 0.99)) if len(waited) >= TAIL_CALLS else None
        eager_us = float(np.median(waited))
        timed[name] = _host_us(calls, _affordable(eager_us, seconds)), eager_us, tail
    return {
        name: Gauged(*timed[name], _launches(calls[0]), _temporary_bytes(calls[0]))
        for name, calls in contenders.items()
    }


def _affordable(call_us: float, seconds: float) -> int:
    return max(FEWEST_CALLS, int(1e6 * seconds / call_us))


def _host_us(calls: Sequence[Call], affordable: int) -> float:
    """Microseconds until a call returns, the GPU still at work: the median of groups."""
    each = min(HOST_CALLS, affordable // FEWEST_CALLS)
    groups = []
    for _ in range(min(HOST_GROUPS, affordable // each)):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for i in range(each):
            calls[i % len(calls)]()
        groups.append((time.perf_counter() - start) * 1e6 / each)
    torch.cuda.synchronize()
    return float(np.median(groups))


def _waited_us(calls: Sequence[Call], seconds: float) -> list[float]:
    """Microseconds of each call until its result is there."""
    samples = [_waited_once_us(calls, i) for i in range(FEWEST_CALLS)]
    affordable = _affordable(float(np.median(samples)), seconds)
    wanted = TAIL_CALLS if affordable >= TAIL_CALLS else min(FEW_CALLS, affordable)
    return [*samples, *(_waited_once_us(calls, i) for i in range(FEWEST_CALLS, wanted))]


def _waited_once_us(calls: Sequence[Call], number: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    calls[number % len(calls)]()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e6


def _launches(call: Call) -> int:
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    events = seen.events() or []
    return sum(1 for each in events if each.device_type.name == "CUDA")


def _temporary_bytes(call: Call) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_allocated() - before
    kept = torch.cuda.memory_allocated() - before
    del result  # it was held until here, so that what is kept is the output
    return max(0, taken - max(0, kept))
