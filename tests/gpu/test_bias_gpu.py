"""Biases over caches and of packed sequences on a GPU: candidates, dead memory, far steps."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from ahead import compiling, varied
from running import run

from autoflash.accuracy import Budget
from autoflash.config import Config
from autoflash.families import FAMILIES, decode_last, serving
from autoflash.gpu import Gpu, detect
from autoflash.inputs import Inputs, make_inputs
from autoflash.problem import Problem

pytestmark = pytest.mark.gpu

LENGTHS = [0, 1, 2, 5, 64, 65, 4096]
KEYS = [0, 1, 17, 77, 128, 300, 641]  # of chunks of 77 queries
PACKED = [(1, 641), (0, 5), (77, 77), (64, 300), (5, 0), (33, 129)]
INF = float("inf")


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    return detect()


def step(**changed: Any) -> Inputs:
    """A decode step with a bias of each head of each sequence, NaN past the lengths."""
    fields: dict[str, Any] = {"dtype": "bf16", "num_heads": 8, "num_kv_heads": 2, "head_dim": 128}
    fields |= {"batch": len(LENGTHS), "seqlen_q": 1, "seqlen_k": 4096, "page_size": 16}
    p = Problem("decode", bias=True, **{**fields, **changed})
    return make_inputs(p, device="cuda", lengths=LENGTHS)


def chunks(**changed: Any) -> Inputs:
    """Chunks over pages, or packed sequences, with such a bias."""
    fields: dict[str, Any] = {"dtype": "bf16", "num_heads": 6, "num_kv_heads": 3, "head_dim": 128}
    fields |= {"seqlen_q": 77, "seqlen_k": 641, "lengths": "ragged", **changed}
    lengths = PACKED if fields.get("layout") == "thd" else KEYS
    p = Problem("prefill", batch=len(lengths), bias=True, **fields)
    inputs = make_inputs(p, device="cuda", lengths=lengths)
    assert inputs.bias is not None
    shape = (p.batch, p.num_heads, p.seqlen_q, inputs.bias.shape[3])
    bias = torch.randn(shape, device="cuda").to(inputs.q.dtype)
    for b, each in enumerate(lengths):
        rows, keys = each if isinstance(each, tuple) else (p.seqlen_q, each)
        bias[b, :, rows:] = bias[b, :, :, keys:] = float("nan")
    return replace(inputs, bias=bias)


def candidates(p: Problem, gpu: Gpu) -> list[Config]:
    """Some of the problem's candidates; those of decode that merge without a kernel too."""
    (family, *_) = serving(p, gpu)
    chosen = varied(family, p, gpu)
    if family.name == "decode":
        last = varied(decode_last.FAMILY, replace(p, batch=256), gpu)
        chosen += [c for c in last if FAMILIES["decode_last"].misfit(p, c.as_dict(), gpu) is None]
    return compiling(chosen, p, gpu)


def same_bits(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    "made",
    [
        (step, {}),
        (step, {"page_size": 0, "seqlen_q": 4}),
        (step, {"page_size": 1, "kv_layout": "hnd", "head_dim": 64, "num_heads": 71 * 2}),
        (step, {"dtype": "fp32", "head_dim": 64, "seqlen_q": 3}),
        (step, {"head_dim": 256, "num_heads": 16, "num_kv_heads": 1, "dtype": "fp16"}),
        (step, {"window_left": 63, "softcap": True, "sinks": True, "seqlen_q": 4}),
        (step, {"kv_dtype": "fp8_e4m3", "seqlen_q": 16}),
        (step, {"kv_dtype": "int8", "kv_scales": "token", "page_size": 64}),
        (step, {"head_dim": 576, "head_dim_v": 512, "num_kv_heads": 1, "num_heads": 16}),
        (chunks, {"page_size": 16}),
        (chunks, {"page_size": 128, "kv_layout": "hnd", "causal": False, "softcap": True}),
        (chunks, {"page_size": 64, "layout": "thd", "head_dim": 64}),
        (chunks, {"page_size": 48, "window_left": 100, "sinks": True, "head_dim": 256}),
        (chunks, {"layout": "thd"}),
        (chunks, {"layout": "thd", "window_left": 100, "dtype": "fp16", "head_dim": 64}),
        (chunks, {"layout": "thd", "causal": False, "dtype": "fp32", "head_dim": 40}),
    ],
    ids=lambda made: f"{made[0].__name__} {made[1]}",
)
def test_candidates_are_right_and_a_dead_bias_changes_no_bit(made: tuple, gpu: Gpu) -> None:
    make, changed = made
    inputs = make(**changed)
    assert inputs.bias is not None
    spoilt = replace(inputs, bias=inputs.bias.masked_fill(inputs.bias.isnan(), INF))
    budget, failures = Budget(inputs), []
    for config in candidates(inputs.problem, gpu):
        result = run(inputs, config, gpu=gpu)
        verdict = budget.judge(*result)
        if not verdict.correct:
            failures.append(f"{config}: {verdict.reason}")
        if not same_bits(result, run(spoilt, config, gpu=gpu)):
            failures.append(f"{config}: a dead bias counts, or two runs differ")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("pages", ["permuted", "chosen"])
def test_minus_infinity_hides_keys_and_rows_of_a_step(pages: str, gpu: Gpu) -> None:
    inputs = step(seqlen_q=3, pages=pages)
    assert inputs.bias is not None
    bias = inputs.bias.clone()
    bias[6, :, :, 100:3000] = bias[5, 2] = bias[4, :, 1] = -INF
    hidden = replace(inputs, bias=bias)
    budget = Budget(hidden)
    for config in candidates(inputs.problem, gpu):
        verdict = budget.judge(*run(hidden, config, gpu=gpu))
        assert verdict.correct, f"{config}: {verdict.reason}"


@pytest.mark.parametrize("shape", [(), (1, 8, 1, 4096), (7, 1, 1, 1), (1, 8, 2, 1)], ids=str)
def test_a_bias_of_a_step_is_broadcast(shape: tuple[int, ...], gpu: Gpu) -> None:
    inputs = step(seqlen_q=2)
    biased = replace(inputs, bias=torch.randn(shape, device="cuda").bfloat16())
    budget = Budget(biased)
    for config in candidates(inputs.problem, gpu)[:4]:
        verdict = budget.judge(*run(biased, config, gpu=gpu))
        assert verdict.correct, f"{config}: {verdict.reason}"


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_steps_of_a_bias_beyond_32_bits_are_followed(axis: int, gpu: Gpu) -> None:
    """Though no single step is."""
    inputs = step(seqlen_q=3, num_heads=6)
    near = inputs.bias
    assert near is not None
    steps = [18, 3, 1, 126] if axis == 3 else list(near.stride())
    steps[axis] = 2**31 // (near.shape[axis] - 1) + 8  # the last one lies beyond
    memory = torch.empty(2**31 + 2**20, dtype=near.dtype, device="cuda")
    far = memory.as_strided(near.shape, steps).copy_(near)
    for config in candidates(inputs.problem, gpu)[:6]:
        moved = run(replace(inputs, bias=far), config, gpu=gpu)
        assert same_bits(moved, run(inputs, config, gpu=gpu)), config
