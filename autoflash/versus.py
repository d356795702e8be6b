"""Versus: the exported module beside its peers on one problem, in one interleaved run."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from autoflash.accuracy import Verdict, budget_of
from autoflash.check import picked, sample_rows
from autoflash.decision import paired_interval, quantiles
from autoflash.gauges import Gauged
from autoflash.gpu import Gpu
from autoflash.gradients import Gradients
from autoflash.inputs import Inputs, lengths_of, make_inputs
from autoflash.kernel import Result
from autoflash.peers.contender import Contender, Maker, told
from autoflash.problem import Problem
from autoflash.roofline import cache_bytes, floor, visible_pairs
from autoflash.turns import Call, Times, buffer_sets

OURS = "autoflash"
WHOLE_SCORES, WHOLE_BYTES = 2**27, 2**28  # larger outputs are judged by some of their rows
ONE_SET_BYTES = 2**32  # larger inputs are cold without a second set

TimeAll = Callable[[Mapping[str, Sequence[Call]]], Mapping[str, Times]]
GaugeAll = Callable[[Mapping[str, Sequence[Call]]], Mapping[str, Gauged]]


@dataclass(frozen=True)
class Figures:
    """One contender on one problem. Times are microseconds a call, of rounds with all others.

    `regime` says how they were timed: in a CUDA `graph`, or in a `stream` what cannot be captured.
    `error` is the largest error over that of the eager computation.
    """

    median_us: float
    p20_us: float
    p80_us: float
    regime: str
    error: float
    gauged: Gauged


@dataclass(frozen=True)
class Versus:
    """One problem. `ratio` is the best peer's time over ours, with its interval of paired rounds.

    It is None where either is missing. `imprecise` are peers beyond the error budget: they are
    timed and are not counted. `left_out` says why others, or ours, are not there.
    """

    problem: Problem
    weight: float
    figures: Mapping[str, Figures]
    imprecise: Mapping[str, str]
    left_out: Mapping[str, str]
    best_peer: str = ""
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None


def versus(
    problem: Problem,
    weight: float,
    gpu: Gpu,
    makers: Mapping[str, Maker],
    time_all: TimeAll,
    gauge_all: GaugeAll,
    device: str = "cuda",
) -> Versus:
    """Whoever can do the problem and is right, timed in turn; `makers` hold `autoflash` too."""
    inputs = _inputs(problem, gpu, device)
    contenders, errors, imprecise, left_out = admitted(inputs, makers)
    calls = {name: contender.calls for name, contender in contenders.items()}
    times = time_all(calls) if calls else {}
    gauges = gauge_all(calls)
    figures = {}
    for name, one in times.items():
        median, p20, p80 = quantiles(one.samples_us)
        figures[name] = Figures(median, p20, p80, one.regime, errors[name], gauges[name])
    peers = [name for name in figures if name != OURS and name not in imprecise]
    best = min(peers, key=lambda name: figures[name].median_us, default="")
    if not best or OURS not in figures:
        return Versus(problem, weight, figures, imprecise, left_out, best)
    paired = paired_interval(times[best].samples_us, times[OURS].samples_us)
    ratio = figures[best].median_us / figures[OURS].median_us
    bounds = (1 + paired.low, 1 + paired.high)
    return Versus(problem, weight, figures, imprecise, left_out, best, ratio, *bounds)


def admitted(
    inputs: list[Inputs], makers: Mapping[str, Maker]
) -> tuple[dict[str, Contender], dict[str, float], dict[str, str], dict[str, str]]:
    """Contenders with their errors; who is beyond the error budget; why others are left out."""
    judge = _referee(inputs[0])
    contenders, errors, imprecise, left_out = {}, {}, {}, {}
    for name, make in makers.items():
        try:
            made = make(inputs)
            out = made.out()
            for call in made.calls[1:]:
                call()
            verdict = judge(out)
        except Exception as error:  # a peer may raise anything: it is named with it
            left_out[name] = told(error)
            continue
        if _not_finite(out):
            left_out[name] = f"wrong: {_not_finite(out)} is not finite"
        elif not verdict.correct and name == OURS:
            left_out[name] = f"wrong: {verdict.reason}"
        else:
            contenders[name], errors[name] = made, round(verdict.max_ratio, 3)
            if not verdict.correct:
                imprecise[name] = verdict.reason
    return contenders, errors, imprecise, left_out


def case_of(one: Versus, gpu: Gpu) -> dict[str, Any]:
    """The case of a results file: `ours` and `peers` in microseconds, and everything else."""
    work = floor(one.problem, gpu)
    figures = {}
    for name, each in one.figures.items():
        us = each.median_us
        rates = {
            "gbps": round(work.gbps(us), 1),
            "tflops": round(work.tflops(us), 2),
            "percent_of_roofline": round(work.percent(us), 1),
        }
        plain = {key: value for key, value in asdict(each).items() if key != "gauged"}
        figures[name] = {**plain, **rates, **asdict(each.gauged)}
    counted = [name for name in one.figures if name != OURS and name not in one.imprecise]
    return {
        "case": asdict(one.problem),
        "weight": one.weight,
        "unit": "us",
        "ours": one.figures[OURS].median_us if OURS in one.figures else None,
        "peers": {name: one.figures[name].median_us for name in counted},
        "ratio": one.ratio,
        "ratio_interval": [one.ratio_low, one.ratio_high],
        "best_peer": one.best_peer,
        "figures": figures,
        "imprecise": dict(one.imprecise),
        "unavailable": dict(one.left_out),
    }


def summary_of(several: Sequence[Versus]) -> dict[str, Any]:
    """Geometric mean and worst of the ratios of each op, and how many cases have one."""
    found = {}
    for op in dict.fromkeys(one.problem.op for one in several):
        ratios = [one.ratio for one in several if one.problem.op == op and one.ratio is not None]
        if ratios:
            mean = statistics.geometric_mean(ratios)
            found[op] = {"cases": len(ratios), "geometric_mean": mean, "worst": min(ratios)}
    return found


def _inputs(problem: Problem, gpu: Gpu, device: str) -> list[Inputs]:
    """Sets of inputs to rotate through, together beyond twice the cache; one set of lengths."""
    moved = floor(problem, gpu).bytes_moved
    sets = 1 if moved > ONE_SET_BYTES else buffer_sets(moved, gpu.l2_bytes)
    lengths = lengths_of(problem)  # every call of a graph does the same work
    return [make_inputs(problem, seed, device, lengths, poison=False) for seed in range(sets)]


def _not_finite(out: Result) -> str:
    """What of a result is not finite anywhere, "" where all is."""
    named = out._asdict() if isinstance(out, Gradients) else {"out": out}
    return next((name for name, each in named.items() if not each.isfinite().all()), "")


def _referee(inputs: Inputs) -> Callable[[Result], Verdict]:
    """Judges a result by the error budget: whole, or some rows of a large problem."""
    problem = inputs.problem
    scores = visible_pairs(problem) * problem.num_heads
    if scores <= WHOLE_SCORES and cache_bytes(problem) <= WHOLE_BYTES:
        whole = budget_of(inputs)
        return lambda out: whole.judge(out, None)
    rows = sample_rows(problem, seed=0)
    budget = budget_of(inputs, rows)

    def judge(out: Result) -> Verdict:
        if _not_finite(out):
            return Verdict(f"{_not_finite(out)} is not finite", math.inf, math.inf, 0.0)
        return budget.judge(picked(problem, out, None, rows)[0], None)

    return judge
