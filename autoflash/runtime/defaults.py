"""The default knobs of each portable family: valid on every device the family supports."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any

from .problem import Problem
from .validity import (
    DECODE_GROUP_BATCH,
    decode_block_d,
    decode_is_wide,
    decode_refusal,
    decode_smem_bytes,
    prefill_fma_products,
    prefill_one_page,
    prefill_refusal,
    prefill_warpgroup_products,
)

# (BLOCK_M, BLOCK_N, num_warps, num_stages, LOAD) by the largest head_dim, best first: the first
# that is valid serves. Compiled for sm_80, 86, 89, 90, 100, 120 and gfx942 without heavy spills.
PREFILL_WARPGROUP_DEFAULTS = {
    64: ((64, 128, 4, 2, "descriptor"),),
    128: ((64, 64, 4, 3, "descriptor"),),
    256: ((128, 64, 8, 2, "descriptor"),),
}
PREFILL_WARP_DEFAULTS = {
    64: ((64, 64, 4, 3, "pointer"),),
    128: ((128, 64, 8, 3, "pointer"), (64, 64, 4, 2, "pointer")),
    256: ((64, 32, 8, 2, "pointer"), (64, 32, 4, 1, "pointer")),
}
PREFILL_FMA_DEFAULTS = {
    64: ((32, 32, 4, 2, "pointer"),),
    128: ((32, 16, 8, 2, "pointer"),),
    256: ((32, 16, 8, 2, "pointer"), (16, 16, 4, 2, "pointer")),
}
# A tile of a bias takes registers as scores do.
PREFILL_BIAS_WARPGROUP_DEFAULTS = {
    64: ((64, 64, 4, 2, "descriptor"),),
    128: ((64, 64, 8, 2, "descriptor"),),
    256: ((64, 64, 8, 2, "descriptor"),),
}
# The addresses of keys in pages take more: 64 of them spill 384 bytes.
PREFILL_BIAS_PAGES_WIDEST = ((64, 32, 8, 2, "descriptor"),)
PREFILL_BIAS_WARP_DEFAULTS = {
    64: ((64, 32, 4, 3, "pointer"),),
    128: ((64, 32, 4, 2, "pointer"),),
    256: ((64, 32, 8, 2, "pointer"), (64, 32, 4, 1, "pointer")),
}
PREFILL_SMALLEST = ((64, 32, 4, 1, "pointer"), (16, 16, 4, 1, "pointer"))


def prefill_default(problem: Problem, gpu: Any) -> dict[str, int | str]:
    """Knobs that prefill_refusal accepts wherever the problem is served."""
    if prefill_fma_products(problem, gpu):
        by_head_dim = PREFILL_FMA_DEFAULTS
    elif prefill_warpgroup_products(problem, gpu):
        by_head_dim = PREFILL_WARPGROUP_DEFAULTS
        if problem.bias:
            by_head_dim = PREFILL_BIAS_WARPGROUP_DEFAULTS
            if problem.paged:
                by_head_dim = {**by_head_dim, 256: PREFILL_BIAS_PAGES_WIDEST}
    else:
        by_head_dim = PREFILL_BIAS_WARP_DEFAULTS if problem.bias else PREFILL_WARP_DEFAULTS
    widest = max(problem.head_dim, problem.head_dim_v)
    wide = min(limit for limit in by_head_dim if widest <= limit)
    names = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages", "LOAD")
    choices: list[dict[str, int | str]] = [
        dict(zip(names, (*_within_blocks(problem, *values[:2]), *values[2:])), HEAD_GROUP_MIB=4)
        for values in (*by_head_dim[wide], *PREFILL_SMALLEST)
    ]
    if problem.paged:
        choices = [
            knobs if prefill_one_page(problem, knobs) else {**knobs, "LOAD": "pointer"}
            for knobs in choices
        ]
    if problem.masked_by == "documents":
        # with the ids of keys in flight too; H200, 128 channels: three stages took 29 % longer
        choices = [{**knobs, "num_stages": min(int(knobs["num_stages"]), 2)} for knobs in choices]
    valid = (knobs for knobs in choices if prefill_refusal(problem, knobs, gpu) is None)
    return next(valid, choices[-1])


def _within_blocks(problem: Problem, block_m: int, block_n: int) -> tuple[int, int]:
    """The tile, smaller where the blocks of a mask are no multiples of it."""
    if problem.masked_by != "blocks":
        return block_m, block_n
    return gcd(block_m, problem.mask_block_q), gcd(block_n, problem.mask_block_k)


# (SWAP, BLOCK_N, num_warps, num_stages), best first: the first that is valid serves.
# H200: the first is within 5 % of the best config on every decode shape that was measured.
DECODE_DEFAULTS = (
    (1, 64, 4, 3),
    (1, 64, 4, 2),
    (0, 64, 4, 3),
    (0, 32, 4, 3),
    (0, 32, 4, 2),
    (0, 16, 4, 2),
    (0, 16, 4, 1),
)
DECODE_WIDE_DEFAULTS = ((0, 64, 8, 2), (0, 32, 8, 2), (0, 16, 8, 2), (0, 16, 8, 1))
DECODE_FP32_DEFAULTS = DECODE_WIDE_DEFAULTS[1:]  # without tensor cores, 64 keys may spill
DECODE_REGISTERS = {64: 128, 128: 168, 256: 255}  # per thread, by channels of a tile; as compiled


def decode_default(problem: Problem, gpu: Any) -> dict[str, int | str]:
    """Knobs that decode_refusal accepts wherever the problem is served."""
    balanced = problem.lengths != "equal" and 1 < problem.batch <= DECODE_GROUP_BATCH
    names = ("SWAP", "BLOCK_N", "num_warps", "num_stages")
    by_preference = DECODE_WIDE_DEFAULTS if decode_is_wide(problem) else DECODE_DEFAULTS
    if problem.dtype == "fp32":
        by_preference = DECODE_FP32_DEFAULTS
    choices: list[dict[str, int | str]] = [
        dict(
            zip(names, values, strict=True),
            SCHEDULE="group" if balanced else "split",
            DEPENDENT_LAUNCH=int(gpu.capability >= 90),
            COMBINE_WARPS=4,
        )
        for values in by_preference
    ]
    valid = (knobs for knobs in choices if decode_refusal(problem, knobs, gpu) is None)
    knobs = next(valid, choices[-1])
    return {**knobs, "PROGRAMS_PER_SM": decode_programs_per_sm(problem, knobs, gpu)}


def decode_last_default(problem: Problem, gpu: Any) -> dict[str, int | str]:
    """The same for the family in which no second kernel merges."""
    knobs = decode_default(problem, gpu)
    return {name: value for name, value in knobs.items() if name != "COMBINE_WARPS"}


def decode_programs_per_sm(problem: Problem, knobs: Mapping[str, Any], gpu: Any) -> int:
    """Programs that an SM holds at once, at most 8."""
    threads = int(knobs["num_warps"]) * (32 if gpu.vendor == "nvidia" else 64)
    registers = DECODE_REGISTERS[max(64, decode_block_d(problem))]
    if decode_is_wide(problem) or problem.dtype == "fp32":
        registers = 255
    reserved = 1024  # bytes of shared memory the driver keeps for each program
    fits = min(
        gpu.smem_per_sm // (decode_smem_bytes(problem, knobs, gpu) + reserved),
        gpu.registers_per_sm // (registers * threads),
        gpu.threads_per_sm // threads,
        8,
    )
    return max(1, fits)
