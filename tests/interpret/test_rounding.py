"""Rounding in the interpreter is a GPU's: to the nearest bf16, ties to even."""

import torch
import triton
import triton.language as tl

from autoflash.runtime.launch import run_plan


@triton.jit
def cast_kernel(source, out, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(out + offsets, tl.load(source + offsets).to(tl.bfloat16))


def cast(values):
    out = torch.empty(len(values), dtype=torch.bfloat16)
    run_plan([(cast_kernel, (1,), (values, out, len(values)), {})])
    return out


def test_a_cast_to_bf16_rounds_to_nearest_even():
    random = torch.randn(1024, generator=torch.Generator().manual_seed(0))
    assert torch.equal(cast(random), random.bfloat16())
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 3e38])
    assert torch.equal(cast(ties), ties.bfloat16())


def test_a_cast_to_bf16_keeps_infinity_and_nan():
    special = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0])
    assert torch.equal(cast(special)[:2], special[:2].bfloat16())
    assert cast(special)[2].isnan()
