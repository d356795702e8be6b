"""Page: what a database holds, as one HTML file."""

import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from autoflash import __version__
from autoflash.explain import Explanation, Failure
from autoflash.gpu import Gpu
from autoflash.problem import Problem, title
from autoflash.report.beside import Beside
from autoflash.report.chart import Point
from autoflash.report.heat_map import HeatMap, Value, by_kind, heat_map, kind
from autoflash.report.kernels import Kernel, kernels
from autoflash.report.plots import anytime, roofline

EVEN = 1.0  # the ratio at which neither is faster


@dataclass(frozen=True)
class Machine:
    """One GPU type with one toolchain: everything that was measured there."""

    gpu: Gpu
    toolchain: str
    summary: tuple[tuple[str, str], ...]
    roofline: str | None
    maps: Mapping[str, tuple[HeatMap, ...]]  # by kind of problem
    knobs: Mapping[str, tuple[tuple[str, int, float | None], ...]]  # by family
    kernels: tuple[Kernel, ...]
    winners: tuple[Mapping[str, Any], ...]
    failures: tuple[Failure, ...]


@dataclass(frozen=True)
class Run:
    """One search, with its anytime plot."""

    told: Mapping[str, Any]
    command: str
    anytime: str | None


def page(
    explanations: Sequence[Explanation],
    runs: Sequence[tuple[Mapping[str, Any], Mapping[Problem, Sequence[Point]]]],
    beside: Sequence[Beside],
    written: str,
) -> str:
    """The whole file. `runs` are rows of `run_rows` with the points of `Store.anytime`."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        version=__version__,
        written=written,
        machines=machines(explanations),
        runs=[_run(told, curves) for told, curves in runs],
        peers=peer_maps(beside),
        peers_summary=_peers_summary(beside),
        sources=sorted({one.source for one in beside}),
    )


def machines(explanations: Sequence[Explanation]) -> list[Machine]:
    """The explanations by GPU type and toolchain, in the order in which they come."""
    groups: dict[tuple[Any, ...], list[Explanation]] = defaultdict(list)
    for one in explanations:
        groups[one.winner.gpu.identity, one.winner.toolchain].append(one)
    return [_machine(several) for several in groups.values()]


def peer_maps(beside: Sequence[Beside]) -> dict[str, tuple[HeatMap, ...]]:
    """For each GPU and kind of problem: ours, the best peer, and the ratio."""
    found = {}
    for gpu in dict.fromkeys(one.gpu for one in beside):
        of_gpu = {one.problem: one for one in beside if one.gpu == gpu}
        ratios = [one.ratio for one in of_gpu.values()]
        low, high = min(EVEN, *ratios), max(EVEN, *ratios)
        for name, values in by_kind(_beside_values(of_gpu, low)).items():
            ones = [of_gpu[problem] for problem, *_ in values]
            ours = [(o.problem, o.ours_us, _us(o.ours_us), "") for o in ones]
            peers = [
                (o.problem, best := o.peers_us[o.best_peer], f"{_us(best)}\n{o.best_peer}", "")
                for o in ones
            ]
            found[f"{name}, on {gpu}"] = (
                heat_map("autoflash, us", ours, 0.0, math.inf),
                heat_map("best peer, us", peers, 0.0, math.inf),
                heat_map("best peer / autoflash: above 1 autoflash is faster", values, low, high),
            )
    return found


def _beside_values(of_gpu: Mapping[Problem, Beside], low: float) -> list[Value]:
    return [
        (problem, max(one.ratio, low), f"{one.ratio:.2f}", f"{one.best_peer} is the best peer")
        for problem, one in of_gpu.items()
    ]


def _peers_summary(beside: Sequence[Beside]) -> tuple[tuple[str, str], ...]:
    found = []
    for op in dict.fromkeys(one.problem.op for one in beside):
        ratios = [one.ratio for one in beside if one.problem.op == op]
        mean = statistics.geometric_mean(ratios)
        told = f"{mean:.2f} on average, {min(ratios):.2f} at worst, of {len(ratios)} shapes"
        found.append((f"best peer / autoflash, {op}", told))
    return tuple(found)


def _machine(explanations: Sequence[Explanation]) -> Machine:
    gpu, chain = explanations[0].winner.gpu, explanations[0].winner.toolchain
    told = f"triton {chain.triton}, torch {chain.torch}, driver {chain.driver or 'none'}"
    return Machine(
        gpu=gpu,
        toolchain=told,
        summary=_summary(explanations),
        roofline=roofline(gpu, explanations),
        maps=_maps(explanations),
        knobs=_knobs(explanations),
        kernels=tuple(kernels(explanations)),
        winners=tuple(_winner(one) for one in explanations),
        failures=_failures(explanations),
    )


def _summary(explanations: Sequence[Explanation]) -> tuple[tuple[str, str], ...]:
    gains = [1 + one.winner.decision.margin for one in explanations]
    limiters = Counter(one.limits.limiter for one in explanations if one.limits.limiter)
    tried, failed = (
        sum(one.candidates for one in explanations),
        sum(failure.candidates for one in explanations for failure in one.failures),
    )
    percents: dict[str, list[float]] = defaultdict(list)
    for one in explanations:
        decision = one.winner.decision
        percents[decision.problem.op].append(one.floor.percent(decision.winner_us))
    rows = [
        ("problems", str(len(explanations))),
        ("candidates tried", f"{tried}, of which {failed} failed"),
        ("winner over default", f"{statistics.geometric_mean(gains):.2f} times as fast on average"),
    ]
    rows += [
        (f"part of the roofline, {op}", f"{min(p):.0f} to {max(p):.0f} %, median {_median(p)} %")
        for op, p in percents.items()
        if max(p)
    ]
    rows.append(("limited by", ", ".join(f"{name} {n}" for name, n in limiters.most_common())))
    return tuple(rows)


def _maps(explanations: Sequence[Explanation]) -> dict[str, tuple[HeatMap, ...]]:
    """By kind of problem: time with part of the roofline, and gain over the default."""
    groups: dict[str, list[Explanation]] = defaultdict(list)
    for one in explanations:
        groups[kind(one.winner.decision.problem)].append(one)
    found = {}
    for name, several in groups.items():
        roofs: list[Value] = []
        gains: list[Value] = []
        for one in several:
            decision = one.winner.decision
            percent = one.floor.percent(decision.winner_us)
            told = f"{one.limits.limiter}; {decision.winner}"
            text = _us(decision.winner_us) + (f"\n{percent:.0f} %" if percent else "")
            roofs.append((decision.problem, percent, text, told))
            gain = 100 * decision.margin
            against = f"the default takes {decision.default_us:.5g} us: {decision.default}"
            gains.append((decision.problem, gain, f"{gain:.0f} %", against))
        largest = max(gain for _, gain, _, _ in gains)
        found[name] = (
            heat_map("us, and percent of the roofline", roofs, 0.0, 100.0),
            heat_map("the family's default takes so much longer", gains, 0.0, max(largest, 1.0)),
        )
    return found


def _knobs(
    explanations: Sequence[Explanation],
) -> dict[str, tuple[tuple[str, int, float | None], ...]]:
    """By family: each knob, its importance and what another value loses, percent, on average."""
    costs: dict[str, dict[str, list[tuple[float, float | None]]]] = defaultdict(dict)
    for one in explanations:
        family = costs[one.winner.decision.winner.family]
        for cost in one.knobs:
            family.setdefault(cost.name, []).append((cost.importance, cost.loses))
    found = {}
    for family, knobs in costs.items():
        rows = []
        for name, several in knobs.items():
            losses = [loses for _, loses in several if loses is not None]
            loses = 100 * statistics.mean(losses) if losses else None
            rows.append((name, round(100 * statistics.mean(i for i, _ in several)), loses))
        found[family] = tuple(sorted(rows, key=lambda row: (-row[1], row[0])))
    return found


def _winner(one: Explanation) -> dict[str, Any]:
    decision = one.winner.decision
    return {
        "problem": title(decision.problem),
        "family": decision.winner.family,
        "knobs": " ".join(f"{name}={value}" for name, value in decision.winner.knobs),
        "us": _us(decision.winner_us),
        "percent": round(one.floor.percent(decision.winner_us)),
        "limiter": one.limits.limiter,
        "gain": f"{100 * decision.margin:.1f}",
        "interval": f"{100 * decision.margin_low:.1f} to {100 * decision.margin_high:.1f}",
        "spills": one.resources.spill_bytes or 0,
        "tried": one.candidates,
        "decided": one.winner.decided_at[:10],
    }


def _failures(explanations: Sequence[Explanation]) -> tuple[Failure, ...]:
    """The failures of all problems, those of one reason together."""
    groups: dict[tuple[str, str, str], list[Failure]] = defaultdict(list)
    for failure in (failure for one in explanations for failure in one.failures):
        groups[failure.family, failure.status, failure.reason].append(failure)
    merged = [
        Failure(*key, sum(each.candidates for each in several), several[0].example)
        for key, several in groups.items()
    ]
    return tuple(sorted(merged, key=lambda failure: -failure.candidates))


def _run(told: Mapping[str, Any], curves: Mapping[Problem, Sequence[Point]]) -> Run:
    command = " ".join(["autoflash", *json.loads(told["argv_json"])])
    return Run(told, command, anytime(curves))


def _us(us: float) -> str:
    return f"{us:.4g}" if us < 10_000 else f"{us:.0f}"


def _median(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.0f}"
