"""Windows and modifiers of prefill on a GPU: every candidate, all loads, long prompts skipped."""

from dataclasses import replace

import pytest
import torch
from ahead import compile_ahead
from running import run

from autoflash.accuracy import Budget
from autoflash.check import sample_rows
from autoflash.families.family import space
from autoflash.families.prefill import FAMILY
from autoflash.gpu import Gpu, detect
from autoflash.inputs import make_inputs
from autoflash.problem import Problem

pytestmark = pytest.mark.gpu

EDGES = [(1, 1), (64, 64), (65, 129), (300, 77), (130, 3), (385, 385), (5, 0)]
ON = {
    "causal window": {"window_left": 65},
    "window": {"causal": False, "window_left": 0, "window_right": 63},
    "softcap": {"softcap": True},
    "alibi": {"alibi": True, "causal": False},
    "bias": {"bias": True},
    "sinks": {"sinks": True},
    "all": {"window_left": 100, "softcap": True, "bias": True, "sinks": True},
}


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    return detect()


def of(seqlen_q: int, seqlen_k: int, **changes) -> Problem:
    fields = {"dtype": "bf16", "batch": 2, "num_heads": 6, "num_kv_heads": 3, "head_dim": 128}
    return Problem("prefill", seqlen_q=seqlen_q, seqlen_k=seqlen_k, **{**fields, **changes})


@pytest.mark.parametrize("on", ON.values(), ids=ON)
@pytest.mark.parametrize(("dtype", "head_dim"), [("bf16", 128), ("fp16", 64), ("fp32", 40)])
def test_every_candidate_is_right_at_every_edge_and_repeats_its_bits(  # case B22, B29, B44, B45
    gpu, dtype, head_dim, on
):
    changes = {"dtype": dtype, "head_dim": head_dim, **on}
    candidates = [c for c, reason in space(FAMILY, of(1000, 1000, **changes), gpu) if not reason]
    configs = list({FAMILY.binary(config): config for config in candidates}.values())
    problems = [of(*lengths, **changes) for lengths in EDGES]
    compile_ahead(dict.fromkeys(configs, problems), gpu)
    failures = []
    for problem in problems:
        inputs = make_inputs(problem, device="cuda")
        budget = Budget(inputs)
        for config in configs:
            out, lse = run(inputs, config, gpu=gpu)
            verdict = budget.judge(out, lse)
            lengths = f"{problem.seqlen_q}x{problem.seqlen_k}"
            if not verdict.correct:
                failures.append(f"{lengths} {config}: {verdict.reason}")
            if not torch.equal(out, run(inputs, config, gpu=gpu)[0]):
                failures.append(f"{lengths} {config}: two runs differ")
    assert failures == []


@pytest.mark.parametrize("left", [127, 4095])
def test_a_long_prompt_reads_no_key_before_its_window(gpu, left):
    """The last 128 queries over 32768 keys, those before all windows NaN."""
    problem = of(128, 32768, window_left=left, batch=1)
    inputs = make_inputs(problem, device="cuda")
    config = FAMILY.default(problem, gpu)
    out, lse = run(inputs, config, gpu=gpu)
    k, v = inputs.k.clone(), inputs.v.clone()
    dead = 32768 - 128 - left
    k[:, :dead] = v[:, :dead] = float("nan")
    again, lse_again = run(replace(inputs, k=k, v=v), config, gpu=gpu)
    assert torch.equal(out, again) and torch.equal(lse, lse_again)


@pytest.mark.parametrize("on", [{"window_left": 4095}, {"softcap": True, "window_left": 1000}])
def test_rows_of_a_long_prompt_are_right(gpu, on):
    problem = of(16384, 16384, batch=1, **on)
    inputs = make_inputs(problem, device="cuda")
    rows = sample_rows(problem, seed=0)
    out, lse = run(inputs, FAMILY.default(problem, gpu), gpu=gpu)
    b, h, i = torch.tensor(rows, device="cuda").T
    verdict = Budget(inputs, rows=rows).judge(out[b, i, h], lse[b, h, i])
    assert verdict.correct, verdict.reason
