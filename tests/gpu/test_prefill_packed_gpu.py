"""Packed sequences on a GPU: every candidate, more of them than a grid's axis holds, long ones."""

from dataclasses import replace

import pytest
import torch
from ahead import compile_ahead
from running import run

from autoflash.accuracy import Budget
from autoflash.check import picked, sample_rows
from autoflash.families.family import space
from autoflash.families.prefill import FAMILY
from autoflash.gpu import Gpu, detect
from autoflash.inputs import make_inputs
from autoflash.problem import Problem

pytestmark = pytest.mark.gpu

RAGGED = [(0, 5), (64, 64), (1, 1), (300, 77), (5, 0), (0, 0), (130, 385), (127, 127), (0, 7)]
ON = {
    "causal": {"causal": True},
    "full": {"causal": False},
    "all": {"window_left": 100, "softcap": True, "alibi": True, "sinks": True},
}


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    return detect()


def of(batch: int, seqlen_q: int, seqlen_k: int, **changes) -> Problem:
    fields = {"dtype": "bf16", "num_heads": 6, "num_kv_heads": 3, "head_dim": 128}
    fields |= {"batch": batch, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    return Problem("prefill", layout="thd", **{**fields, "lengths": "ragged", **changes})


@pytest.mark.parametrize("on", ON.values(), ids=ON)
@pytest.mark.parametrize(("dtype", "head_dim"), [("bf16", 128), ("fp16", 40), ("fp32", 64)])
def test_every_candidate_is_right_and_keeps_sequences_apart(  # case B06, case B18
    gpu, dtype, head_dim, on
):
    changes = {"dtype": dtype, "head_dim": head_dim, **on}
    long = of(4, 4096, 4096, **changes)
    candidates = [config for config, reason in space(FAMILY, long, gpu) if not reason]
    configs = list({FAMILY.binary(config): config for config in candidates}.values())
    problem = of(len(RAGGED), 300, 385, **changes)
    compile_ahead({config: [problem] for config in configs}, gpu)
    inputs = make_inputs(problem, device="cuda", lengths=RAGGED)
    budget = Budget(inputs)
    # the sequence of 127 keys ends where one begins that is no number
    spoilt = {name: getattr(inputs, name).clone() for name in ("k", "v")}
    for tensor in spoilt.values():
        tensor[-7:] = float("nan")
    failures = []
    for config in configs:
        out, lse = run(inputs, config, gpu=gpu)
        verdict = budget.judge(out, lse)
        if not verdict.correct:
            failures.append(f"{config}: {verdict.reason}")
        if not torch.equal(out, run(replace(inputs, **spoilt), config, gpu=gpu)[0]):
            failures.append(f"{config}: a neighbour's keys count")
    assert not failures, "\n".join(failures)


def test_more_sequences_than_an_axis_of_a_grid_holds_are_right(gpu):  # case B14
    """Of one token each: every query sees its own key alone."""
    problem = of(65_600, 1, 1, num_kv_heads=6, lengths="equal")
    inputs = make_inputs(problem, device="cuda")
    out, _ = run(inputs, FAMILY.default(problem, gpu), gpu=gpu)
    assert torch.equal(out, inputs.v)


def test_long_sequences_of_different_lengths_are_right(gpu):
    problem = of(9, 8192, 8192, num_heads=32, num_kv_heads=8)
    inputs = make_inputs(problem, device="cuda")
    rows = sample_rows(problem, 0)
    budget = Budget(inputs, rows=rows)
    for load in ("descriptor", "pointer"):
        config = FAMILY.default(problem, gpu)
        config = type(config).of(config.family, {**config.as_dict(), "LOAD": load})
        verdict = budget.judge(*picked(problem, *run(inputs, config, gpu=gpu), rows))
        assert verdict.correct, f"{load}: {verdict.reason}"
