"""What the benchmarks share: contenders interleaved under CUDA graphs, and the results file."""

import argparse
import importlib.util
import json
import random
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from autoflash.gpu import detect
from autoflash.toolchain import detect_toolchain

RESULTS = Path(__file__).resolve().parent / "results"
LEAST_LAUNCHES = 10  # in one graph
GRAPH_US = 20_000.0  # a graph is about this long at most
ROUNDS = 15

Call = Callable[[], Any]


class Unavailable(Exception):
    """A peer that is not installed or cannot do a case; says why."""


def load_module(path: Path) -> ModuleType:
    """The exported module at `path`."""
    found = importlib.util.spec_from_file_location(path.stem, path)
    if found is None or found.loader is None:
        raise SystemExit(f"error: {path} is not a Python module")
    module = importlib.util.module_from_spec(found)
    sys.modules[path.stem] = module
    found.loader.exec_module(module)
    return module


def buffer_sets(bytes_each: int, l2_bytes: int) -> int:
    """How many sets of inputs together exceed twice the last-level cache; at least two."""
    return min(64, max(2, -(-2 * l2_bytes // max(1, bytes_each)) + 1))


def interleaved_us(
    contenders: Mapping[str, Sequence[Call]], rounds: int = ROUNDS
) -> dict[str, float]:
    """Median microseconds a call of each contender, all measured in turn in random order.

    A contender is one call per set of rotating inputs; its graph goes over them again and again.
    """
    graphs = {name: _graph(calls) for name, calls in contenders.items()}
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    order = list(graphs)
    shuffle = random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            graph, launches = graphs[name]
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()  # the neighbour's clocks and caches are not this contender's
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples[name].append(start.elapsed_time(end) * 1e3 / launches)
    return {name: statistics.median(values) for name, values in samples.items()}


def _graph(calls: Sequence[Call]) -> tuple[torch.cuda.CUDAGraph, int]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        calls[0]()
        end.record()
    end.synchronize()
    one_us = start.elapsed_time(end) * 1e3
    wanted = max(len(calls), LEAST_LAUNCHES)
    launches = max(1, min(wanted, int(GRAPH_US / one_us)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            calls[i % len(calls)]()
    graph.replay()
    torch.cuda.synchronize()
    return graph, launches


def case_result(
    case: Mapping[str, Any],
    times: Mapping[str, float],
    unavailable: Mapping[str, str],
    **more: Any,
) -> dict[str, Any]:
    """One entry of `cases`; `ratio` is the best live peer's time over ours."""
    peers = {name: round(us, 2) for name, us in times.items() if name != "autoflash"}
    ours = round(times["autoflash"], 2)
    ratio = round(min(peers.values()) / ours, 4) if peers else None
    result = {"case": dict(case), "unit": "us", "ours": ours, "peers": peers, "ratio": ratio}
    if unavailable:
        result["unavailable"] = dict(unavailable)
    return {**result, **more}


def geometric_mean(values: Sequence[float]) -> float:
    return statistics.geometric_mean(values) if values else float("nan")


def write_results(name: str, cases: Sequence[Mapping[str, Any]], **more: Any) -> Path:
    """Write `results/<name>-<GPU>.json` with device, versions, command and date."""
    gpu, chain = detect(), detect_toolchain()
    path = RESULTS / f"{name}-{gpu.slug}.json"
    script = Path(sys.argv[0])
    command = shlex.join(["python", f"{script.parent.name}/{script.name}", *sys.argv[1:]])
    results = {
        "device": {"name": gpu.name, "arch": gpu.arch, "num_sms": gpu.num_sms},
        "versions": {"driver": chain.driver, "torch": chain.torch, "triton": chain.triton},
        "command": command,
        "date": datetime.now(UTC).date().isoformat(),
        **more,
        "cases": list(cases),
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
    return path


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser with what every benchmark takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--module", type=Path, default=Path("attention_dispatch.py"))
    parser.add_argument("--cases", default="", help="only cases whose text contains this")
    return parser
