"""What a config of the backward must fulfil to be right on a device, and the default knobs."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any

from .problem import Problem
from .validity import prefill_blocks_d, prefill_fma_products, prefill_warpgroup_products

BACKWARD_MODIFIERS = ("softcap", "alibi", "bias", "sinks", "dropout")


def backward_unsupported(problem: Problem, gpu: Any) -> str | None:
    """Why the portable backward kernels cannot serve the problem on the GPU, or None."""
    p = problem
    if p.op != "backward":
        return f"serves backward, not {p.op}"
    unknown = [name for name in p.modifiers if name not in BACKWARD_MODIFIERS]
    if unknown:
        return f"{', '.join(unknown)}: not served by the backward yet"
    if p.paged:
        return "keys in pages are not served"
    if p.lengths != "equal" and not p.varlen:
        return "sequences of different lengths must be packed, in layout thd"
    if p.head_dim_v % 8 or not 16 <= p.head_dim_v <= 256:
        return f"head_dim_v {p.head_dim_v} is not a multiple of 8 from 16 to 256"
    if p.kv_dtype != p.dtype or p.out_dtype != p.dtype:
        return f"kv_dtype {p.kv_dtype} and out_dtype {p.out_dtype} are not both dtype {p.dtype}"
    if gpu.vendor == "nvidia" and gpu.capability < 80:
        return f"{gpu.arch} is older than sm_80"  # bf16 and asynchronous copies begin there
    return None


def backward_refusal(problem: Problem, knobs: Mapping[str, Any], gpu: Any) -> str | None:
    """Why these knobs cannot serve the problem on the GPU, or None."""
    reason = backward_unsupported(problem, gpu)
    if reason:
        return reason
    wrong = _backward_load_refusal(knobs, gpu) or _backward_blocks_refusal(problem, knobs)
    return wrong or _backward_smem_refusal(backward_smem_bytes(problem, knobs, gpu), gpu)


def backward_smem_bytes(problem: Problem, knobs: Mapping[str, Any], gpu: Any) -> dict[str, int]:
    """A bound of the shared memory that a program takes, found from what triton 3.6 compiles."""
    kv = (knobs["KV_BLOCK_N"], knobs["KV_BLOCK_M"], knobs["KV_STAGES"])
    q = (knobs["Q_BLOCK_M"], knobs["Q_BLOCK_N"], knobs["Q_STAGES"])
    return {
        "dk and dv": _backward_part_smem_bytes(problem, *kv, gpu),
        "dq": _backward_part_smem_bytes(problem, *q, gpu),
    }


def backward_single_unsupported(problem: Problem, gpu: Any) -> str | None:
    """Why the single pass cannot serve the problem on the GPU, or None."""
    if problem.deterministic:
        return "dq is added up in an order that no two runs share"
    return backward_unsupported(problem, gpu)


def backward_single_refusal(problem: Problem, knobs: Mapping[str, Any], gpu: Any) -> str | None:
    """Why these knobs cannot serve the problem on the GPU in a single pass, or None."""
    reason = backward_single_unsupported(problem, gpu)
    if reason:
        return reason
    wrong = _backward_load_refusal(knobs, gpu) or _backward_blocks_refusal(problem, knobs)
    return wrong or _backward_smem_refusal(
        {"the pass": backward_single_smem_bytes(problem, knobs, gpu)}, gpu
    )


def backward_single_smem_bytes(problem: Problem, knobs: Mapping[str, Any], gpu: Any) -> int:
    """A bound of the shared memory of the single pass: ds is read there, dq leaves through it."""
    block_m, block_n = knobs["KV_BLOCK_M"], knobs["KV_BLOCK_N"]
    plain = _backward_part_smem_bytes(problem, block_n, block_m, knobs["KV_STAGES"], gpu)
    padded, _ = prefill_blocks_d(problem)
    dq_tile = 4 * block_m * padded
    again = 0
    if block_m < 64 and knobs["LOAD"] == "pointer" and prefill_warpgroup_products(problem, gpu):
        # no warpgroup multiplies fewer rows: K lies there once more, as others read it for dq
        again = block_n * padded * problem.dtype_bytes
    return plain + dq_tile + again + 1024  # barriers


def _backward_load_refusal(knobs: Mapping[str, Any], gpu: Any) -> str | None:
    if knobs["LOAD"] == "descriptor" and gpu.capability < 90:
        return f"tensor descriptors need sm_90, this is {gpu.arch}"
    return None


def _backward_blocks_refusal(problem: Problem, knobs: Mapping[str, Any]) -> str | None:
    if problem.masked_by != "blocks":
        return None
    for axis, size in (("M", problem.mask_block_q), ("N", problem.mask_block_k)):
        for name in (f"KV_BLOCK_{axis}", f"Q_BLOCK_{axis}"):
            if name in knobs and size % knobs[name]:
                return f"{name} {knobs[name]} does not divide the mask's blocks of {size}"
    return None


def _backward_smem_refusal(parts: Mapping[str, int], gpu: Any) -> str | None:
    for part, smem_bytes in parts.items():
        if smem_bytes > gpu.smem_per_block:
            return (
                f"{smem_bytes} bytes of shared memory for {part},"
                f" a block of {gpu.arch} has {gpu.smem_per_block}"
            )
    return None


def _backward_part_smem_bytes(problem: Problem, own: int, step: int, stages: int, gpu: Any) -> int:
    """The same of one kernel: two tiles of `own` rows stay, two of `step` rows come by each step.

    One of the two has the channels of q and k, the other those of v.
    Warpgroup products read all of them in shared memory, in every stage; others hold one buffer
    less than stages and pass ds through it. AMD keeps the first two in registers once loaded. The
    kernel of a bias's gradient takes no more: its four tiles have the same sizes and one stage.
    What dropout keeps changes hands between threads, a byte an element, but where each thread of
    warpgroup products has what it draws.
    """
    blocks_d = prefill_blocks_d(problem)
    both, wider = (problem.dtype_bytes * channels for channels in (sum(blocks_d), max(blocks_d)))
    own_tiles, step_tiles = own * both, step * both
    ds_tile = own * step * problem.dtype_bytes
    if problem.bias:  # whose tile is laid out anew too
        ds_tile *= 2
    if problem.dropout and not prefill_warpgroup_products(problem, gpu):
        ds_tile += own * step
    if problem.masked_by == "documents":  # ids are fetched ahead as tiles are
        ds_tile += 4 * stages * step
    if gpu.vendor == "amd":
        coming = step_tiles * (stages - 1) if stages > 1 else step * wider
        return max(own * wider, coming) + ds_tile
    scratch = 1024  # barriers, and reductions across warps
    if prefill_warpgroup_products(problem, gpu):
        return own_tiles + step_tiles * stages + ds_tile + scratch
    coming = step_tiles * max(1, stages - 1)
    if stages == 1 and not prefill_fma_products(problem, gpu):
        coming += step * wider  # read as it lies and transposed
    return own_tiles + coming + ds_tile + scratch


# BLOCK_M, BLOCK_N, WARPS and STAGES of KV and of Q, by the largest head_dim, that of v if it is
# wider. As compiled for sm_80, 90 and gfx942 they do not spill heavily. Those of warpgroups were
# fastest of a few on an H200 at 4096 tokens, but for 64 channels, where 128 by 128 spills.
BACKWARD_WARPGROUP_DEFAULTS = {
    64: ((64, 128, 8, 2), (64, 64, 4, 3)),
    128: ((64, 64, 4, 2), (64, 64, 4, 2)),
    256: ((64, 64, 8, 2), (64, 64, 8, 2)),
}
# What changes scores takes registers, as do the masks of packed sequences and those beyond windows.
BACKWARD_CROWDED_WARPGROUP_DEFAULTS = {
    64: ((32, 64, 4, 2), (64, 64, 4, 2)),
    128: ((32, 64, 4, 2), (64, 64, 4, 2)),
    256: ((32, 64, 8, 1), (64, 32, 8, 2)),
}
# By half as many warps of keys a bias spills hundreds of bytes, a second stage those of sequences.
BACKWARD_BIAS_WARPGROUP_DEFAULTS = {128: ((32, 64, 8, 2), (64, 64, 4, 2))}
BACKWARD_PACKED_WARPGROUP_DEFAULTS = {128: ((32, 64, 4, 1), (64, 64, 4, 2))}
BACKWARD_WARP_DEFAULTS = {
    64: ((32, 64, 4, 2), (64, 32, 4, 2)),
    128: ((32, 64, 8, 2), (64, 32, 8, 2)),
    256: ((32, 32, 8, 1), (32, 32, 8, 2)),
}
BACKWARD_FMA_DEFAULTS = {
    64: ((16, 32, 8, 1), (16, 16, 4, 2)),
    128: ((16, 16, 8, 1), (16, 16, 8, 2)),
    256: ((16, 16, 8, 1), (16, 16, 8, 1)),
}
# Where a block has 64 KB of shared memory only.
BACKWARD_SMALLEST = ((16, 16, 4, 1), (16, 16, 4, 1))


# The same of KV in a single pass, in which the tile of dq takes registers and shared memory too.
BACKWARD_SINGLE_WARPGROUP_DEFAULTS = {
    64: (64, 128, 8, 2),
    128: (64, 64, 8, 2),
    256: (32, 64, 8, 2),
}
BACKWARD_SINGLE_CROWDED_WARPGROUP_DEFAULTS = {
    64: (32, 64, 4, 2),
    128: (32, 64, 8, 2),
    256: (32, 64, 8, 1),
}
BACKWARD_SINGLE_WARP_DEFAULTS = {64: (32, 64, 4, 2), 128: (32, 64, 8, 2), 256: (16, 32, 8, 2)}
BACKWARD_SINGLE_FMA_DEFAULTS = {64: (16, 32, 8, 1), 128: (16, 16, 8, 1), 256: (16, 16, 8, 1)}


def backward_default(problem: Problem, gpu: Any) -> dict[str, int | str]:
    """Knobs that backward_refusal accepts wherever the problem is served."""
    load = "pointer"
    if prefill_fma_products(problem, gpu):
        by_head_dim = BACKWARD_FMA_DEFAULTS
    elif prefill_warpgroup_products(problem, gpu):
        by_head_dim, load = BACKWARD_WARPGROUP_DEFAULTS, "descriptor"
        if _backward_is_crowded(problem):
            by_head_dim = BACKWARD_CROWDED_WARPGROUP_DEFAULTS
            if problem.bias:
                by_head_dim = by_head_dim | BACKWARD_BIAS_WARPGROUP_DEFAULTS
            elif problem.varlen:
                by_head_dim = by_head_dim | BACKWARD_PACKED_WARPGROUP_DEFAULTS
    else:
        by_head_dim = BACKWARD_WARP_DEFAULTS
    widest = max(problem.head_dim, problem.head_dim_v)
    wide = min(limit for limit in by_head_dim if widest <= limit)
    by_preference = [by_head_dim[wide], BACKWARD_WARP_DEFAULTS[wide], BACKWARD_SMALLEST]
    if gpu.vendor == "amd":
        by_preference = [tuple(map(_backward_amd_warps, each)) for each in by_preference]
        if _backward_is_crowded(problem):
            by_preference = [(_backward_staged(kv, 1), q) for kv, q in by_preference]
    elif _backward_spills_staged(problem):
        by_preference = [(_backward_staged(kv, 1), q) for kv, q in by_preference]
    elif problem.dropout and not problem.varlen and load == "descriptor":
        by_preference = [(_backward_staged(kv, 2), q) for kv, q in by_preference]
    choices: list[dict[str, int | str]] = [
        {**_backward_knobs(problem, "KV", kv), **_backward_knobs(problem, "Q", q), "LOAD": load}
        for kv, q in by_preference
    ]
    valid = (knobs for knobs in choices if backward_refusal(problem, knobs, gpu) is None)
    return next(valid, choices[-1])


def backward_single_default(problem: Problem, gpu: Any) -> dict[str, int | str]:
    """The same for the single pass."""
    load = "pointer"
    if prefill_fma_products(problem, gpu):
        by_head_dim = BACKWARD_SINGLE_FMA_DEFAULTS
    elif prefill_warpgroup_products(problem, gpu):
        by_head_dim, load = BACKWARD_SINGLE_WARPGROUP_DEFAULTS, "descriptor"
        if _backward_is_crowded(problem):
            by_head_dim = BACKWARD_SINGLE_CROWDED_WARPGROUP_DEFAULTS
    else:
        by_head_dim = BACKWARD_SINGLE_WARP_DEFAULTS
    widest = max(problem.head_dim, problem.head_dim_v)
    wide = min(limit for limit in by_head_dim if widest <= limit)
    by_preference = [by_head_dim[wide], BACKWARD_SINGLE_WARP_DEFAULTS[wide], BACKWARD_SMALLEST[0]]
    if gpu.vendor == "amd":
        # a second stage spills hundreds of bytes
        by_preference = [(block_m, block_n, 4, 1) for block_m, block_n, _, _ in by_preference]
    elif _backward_spills_staged(problem) or (load == "pointer" and _backward_is_crowded(problem)):
        by_preference = [_backward_staged(each, 1) for each in by_preference]
    elif problem.dropout and not problem.varlen and load == "descriptor":
        by_preference = [_backward_staged(each, 2) for each in by_preference]
    choices = [{**_backward_knobs(problem, "KV", each), "LOAD": load} for each in by_preference]
    valid = (knobs for knobs in choices if backward_single_refusal(problem, knobs, gpu) is None)
    return next(valid, choices[-1])


def _backward_is_crowded(problem: Problem) -> bool:
    """Whether what changes scores, or masks but causal and windows, take registers too."""
    p = problem
    return p.softcap or p.alibi or p.bias or p.dropout or p.varlen or bool(p.masks)


def _backward_spills_staged(problem: Problem) -> bool:
    """Whether a second stage of queries spills hundreds of bytes."""
    return problem.varlen and (problem.bias or problem.masked_by == "documents")


def _backward_staged(values: tuple[int, ...], stages: int) -> tuple[int, ...]:
    """The same tiles with other stages.

    Where registers are crowded a second one was seen to spill hundreds of bytes; where dropout
    takes them, a first one that stands alone.
    """
    return (*values[:3], stages)


def _backward_knobs(problem: Problem, part: str, values: tuple[int, ...]) -> dict[str, int | str]:
    """The knobs of a part; tiles are smaller where they do not divide the blocks of a mask."""
    names = ("BLOCK_M", "BLOCK_N", "WARPS", "STAGES")
    if problem.masked_by == "blocks":
        block_m, block_n, *rest = values
        tile = (gcd(block_m, problem.mask_block_q), gcd(block_n, problem.mask_block_k))
        values = (*tile, *rest)
    return {f"{part}_{name}": value for name, value in zip(names, values)}


def _backward_amd_warps(values: tuple[int, ...]) -> tuple[int, ...]:
    """The same tiles by four warps: of 64 lanes they are as many threads as eight of 32."""
    block_m, block_n, _, stages = values
    return block_m, block_n, 4, stages
