"""Launching a plan: the kernels, grids and arguments that a rendered text's plan() lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from triton import knobs

from .interpreter import mend_interpreter

# (kernel, grid, arguments in order with constexprs, compile options such as num_warps)
Launch = tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]


def interpreted() -> bool:
    """Whether kernels of this process run in triton's interpreter, on CPU tensors."""
    return bool(knobs.runtime.interpret)


def run_plan(plan: Sequence[Launch]) -> list[Any]:
    """Launch every kernel of the plan on the current stream, in order; the compiled kernels."""
    if interpreted():
        mend_interpreter()
        return [kernel[grid](*arguments) for kernel, grid, arguments, _ in plan]
    return [
        kernel[grid](*arguments, enable_fp_fusion=True, **options)
        for kernel, grid, arguments, options in plan
    ]


def compile_plan(plan: Sequence[Launch]) -> list[Any]:
    """Compile every kernel of the plan without launching; the compiled kernels, in order."""
    return [
        kernel.warmup(*arguments, grid=grid, enable_fp_fusion=True, **options)
        for kernel, grid, arguments, options in plan
    ]
