"""The backward benchmark without a GPU: the grid, who is judged how, and what is told."""

import functools
import importlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch.nn.functional as F

from autoflash.inputs import make_inputs
from autoflash.peers.backward import differentiated
from autoflash.peers.contender import Contender
from autoflash.problem import Problem
from autoflash.workload import load_workload

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PROBLEM = Problem("backward", "bf16", 2, 4, 2, 16, 24, 24, layout="bhsd")


@pytest.fixture
def backward(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("backward")


def peer(inputs, layout="bhsd", factor=1.0):
    """A forward of torch's, in its layout, whose gradients can be made wrong."""

    def attend(one):
        heads_first = (t if layout == "bhsd" else t.transpose(1, 2) for t in (one.q, one.k, one.v))
        out = F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
        return (out if layout == "bhsd" else out.transpose(1, 2)) * factor

    return Contender([functools.partial(attend, one) for one in inputs])


def test_the_cases_are_the_grid_of_16384_tokens_with_their_prefills():
    problems = [p for p, _ in load_workload(BENCHMARKS / "workloads" / "backward.yaml").problems]
    grid = {(p.head_dim, p.causal, p.seqlen_q) for p in problems if p.op == "backward"}
    expected = {
        (d, causal, n)
        for d in (64, 128, 256)
        for causal in (True, False)
        for n in (1024, 4096, 16384)
    }
    assert grid == expected
    assert {(p.batch * p.seqlen_q, p.num_heads * p.head_dim) for p in problems} == {(16384, 2048)}
    repeating = {(p.head_dim, p.causal, p.seqlen_q) for p in problems if p.deterministic}
    assert repeating == {each for each in grid if each[0] < 256}
    assert len(problems) == 2 * len(grid) + len(repeating)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("of_problem", ["bhsd", "bshd"])
def test_gradients_are_judged_in_the_layout_of_the_problem(backward, layout, of_problem):
    inputs = [make_inputs(replace(PROBLEM, layout=of_problem), seed) for seed in (0, 1)]
    make = functools.partial(peer, layout=layout)
    made = differentiated(make, layout, inputs)
    assert len(made.calls) == 2
    judge = backward.referee(inputs[0])
    verdict = judge(made.out())
    assert verdict.correct, verdict.reason
    other = differentiated(make, layout, inputs[1:])
    assert not judge(other.out()).correct  # of other inputs


def test_who_is_wrong_or_raises_is_left_out_with_the_reason_and_is_not_timed(backward):
    def absent(inputs):
        raise ImportError("no such peer\nat all")

    made = functools.partial(differentiated, peer, "bhsd")
    wrong = functools.partial(differentiated, functools.partial(peer, factor=1.5), "bhsd")
    inputs = [make_inputs(PROBLEM)]
    makers = {"autoflash": made, "wrong": wrong, "absent": absent}
    calls, left_out, errors = backward.admitted("case", inputs, makers)
    assert list(calls) == ["autoflash"] and set(errors) == {"autoflash", "wrong"}
    assert left_out["absent"] == "ImportError: no such peer"
    assert left_out["wrong"].startswith("wrong: d")
    with pytest.raises(SystemExit, match="case: autoflash: wrong"):
        backward.admitted("case", inputs, {"autoflash": wrong})


def test_a_gradient_that_is_not_finite_anywhere_is_seen(backward):
    inputs = [make_inputs(PROBLEM)]
    gradients = differentiated(peer, "bhsd", inputs).out()
    gradients.dk[0, 0, 0, 0] = float("nan")  # not of the heads that are compared
    assert backward.referee(inputs[0])(gradients).reason == "a gradient is not finite"


def test_figures_are_of_the_cases_that_have_the_ratio(backward):
    results = [
        {"case": {"name": name}, "ratio": ratio}
        for name, ratio in (("a", 2.0), ("b", 0.5), ("c", None))
    ]
    told = backward.figures(results, "ratio")
    assert told == {"cases": 2, "geometric_mean": 1.0, "worst": 0.5, "case": "b"}
    assert backward.figures([], "ratio")["geometric_mean"] is None
