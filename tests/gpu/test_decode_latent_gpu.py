"""Decode of latent attention on a GPU: candidates right, their bits repeated; large caches."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from ahead import compiling, varied
from running import run

from autoflash.accuracy import Budget
from autoflash.check import picked, sample_rows
from autoflash.families.decode_latent import FAMILY
from autoflash.gpu import Gpu, detect
from autoflash.inputs import make_inputs
from autoflash.problem import Problem

pytestmark = pytest.mark.gpu

LENGTHS = [0, 1, 5, 64, 65, 4096]
ALL = {"window_left": 300, "softcap": True, "alibi": True, "sinks": True}


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    return detect()


def problem(batch: int, **changes: Any) -> Problem:
    fields: dict[str, Any] = {"dtype": "bf16", "num_heads": 16, "num_kv_heads": 1, "page_size": 64}
    fields |= {"head_dim": 576, "head_dim_v": 512, "seqlen_q": 1, "seqlen_k": 4096}
    return Problem("decode", batch=batch, **(fields | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_heads": 128},
        {"page_size": 0, "dtype": "fp16", "seqlen_q": 3},
        {"page_size": 3, **ALL},
    ],
    ids=str,
)
def test_candidates_are_right_and_repeat_their_bits(changes: dict, gpu: Gpu) -> None:
    p = problem(len(LENGTHS), **changes)
    configs = compiling(varied(FAMILY, p, gpu), p, gpu)
    inputs = make_inputs(p, device="cuda", lengths=LENGTHS)
    budget, failures = Budget(inputs), []
    for config in configs:
        result = run(inputs, config, gpu=gpu)
        verdict = budget.judge(*result)
        failures += [] if verdict.correct else [f"{config}: {verdict.reason}"]
        if not torch.equal(result[0], run(inputs, config, gpu=gpu)[0]):
            failures.append(f"{config}: two runs differ")
    assert failures == []


def test_rows_of_a_large_cache_are_right(gpu: Gpu) -> None:
    p = replace(problem(64, num_heads=128), seqlen_k=32768, lengths="ragged")
    inputs = make_inputs(p, device="cuda")
    rows = sample_rows(p, seed=0)
    out, lse = run(inputs, FAMILY.default(p, gpu), gpu=gpu)
    result = picked(p, out, lse, rows)
    verdict = Budget(inputs, rows=rows).judge(*result)
    assert verdict.correct, verdict.reason
