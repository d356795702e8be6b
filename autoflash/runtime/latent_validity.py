"""The latent decode family: what it serves, what its knobs must fulfil, its default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .problem import Problem
from .validity import DECODE_GROUP_BATCH, blocks_end_inside


def decode_latent_unsupported(problem: Problem, gpu: Any) -> str | None:
    """Why the latent decode kernels cannot serve the problem on the GPU, or None."""
    p = problem
    if not p.latent:
        return "serves decode of latent attention, head_dim 576 and head_dim_v 512"
    if p.dtype == "fp32" or not p.dtype == p.kv_dtype == p.out_dtype:
        return f"dtype {p.dtype} and kv_dtype {p.kv_dtype} are not one type of 16 bits"
    if p.batch_invariant:
        return "batch_invariant is not served yet: the number of splits depends on the batch"
    if gpu.vendor == "nvidia" and gpu.capability < 80:
        return f"{gpu.arch} is older than sm_80"  # bf16 and asynchronous copies begin there
    return None


def decode_latent_refusal(problem: Problem, knobs: Mapping[str, Any], gpu: Any) -> str | None:
    """Why these knobs cannot serve the problem on the GPU, or None."""
    reason = decode_latent_unsupported(problem, gpu)
    if reason:
        return reason
    if knobs["SCHEDULE"] == "group" and problem.batch > DECODE_GROUP_BATCH:
        return f"the group schedule adds up at most {DECODE_GROUP_BATCH} lengths"
    if knobs["DEPENDENT_LAUNCH"] and gpu.capability < 90:
        return f"dependent launch needs sm_90, this is {gpu.arch}"
    smem_bytes = decode_latent_smem_bytes(problem, knobs, gpu)
    if smem_bytes > gpu.smem_per_block:
        return (
            f"{smem_bytes} bytes of shared memory, a block of {gpu.arch} has {gpu.smem_per_block}"
        )
    return None


def decode_latent_smem_bytes(problem: Problem, knobs: Mapping[str, Any], gpu: Any) -> int:
    """A bound of the shared memory a program takes, found from what triton 3.6 compiles.

    Products of whole warp groups read every stage there. Others hold one buffer less than stages,
    and pass p through it; AMD keeps q in registers. A tile of a bias changes hands, and so does how
    keys are seen where blocks of a mask end inside of tiles.
    """
    block_m, block_n, stages = knobs["BLOCK_M"], knobs["BLOCK_N"], knobs["num_stages"]
    tile = block_n * problem.head_dim * problem.dtype_bytes
    q_tile = block_m * problem.head_dim * problem.dtype_bytes
    result = 4 * block_m * problem.head_dim_v  # fp32 rows change hands to be stored
    passed = block_m * block_n * problem.dtype_bytes
    states = 2 * block_m * block_n * blocks_end_inside(problem, knobs)
    if block_m >= 64 and 90 <= gpu.capability < 120:
        beside = result if gpu.capability >= 100 else 0  # it goes to tensor memory and comes back
        beside += passed * problem.bias + states
        return q_tile + stages * tile + beside + 1024
    held = 0 if gpu.vendor == "amd" else q_tile
    return max(held + max(1, stages - 1) * tile + passed + states, result) + 1024


# (BLOCK_M, BLOCK_N, num_warps, num_stages), best first: the first that is valid serves. Compiled
# for sm_80, 86, 90, 100, 120 and gfx942 without spills.
DECODE_LATENT_DEFAULTS = ((32, 64, 8, 2), (32, 32, 8, 2), (16, 32, 4, 2), (16, 16, 4, 2))


def decode_latent_default(problem: Problem, gpu: Any) -> dict[str, int | str]:
    """Knobs that decode_latent_refusal accepts wherever the problem is served."""
    balanced = problem.lengths != "equal" and 1 < problem.batch <= DECODE_GROUP_BATCH
    names = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
    choices: list[dict[str, int | str]] = [
        dict(
            zip(names, values, strict=True),
            SCHEDULE="group" if balanced else "split",
            DEPENDENT_LAUNCH=int(gpu.capability >= 90),
            COMBINE_WARPS=4,
        )
        for values in DECODE_LATENT_DEFAULTS
        if values[0] <= decode_latent_rows(problem)
    ]
    valid = (knobs for knobs in choices if decode_latent_refusal(problem, knobs, gpu) is None)
    knobs = next(valid, choices[-1])
    return {**knobs, "PROGRAMS_PER_SM": decode_latent_programs_per_sm(problem, knobs, gpu)}


def decode_latent_rows(problem: Problem) -> int:
    """The most rows of a tile that are not all padding."""
    return max(16, 1 << (problem.num_heads * problem.seqlen_q - 1).bit_length())


def decode_latent_programs_per_sm(problem: Problem, knobs: Mapping[str, Any], gpu: Any) -> int:
    """Programs that an SM holds at once: a thread of each takes nearly all registers it may."""
    threads = int(knobs["num_warps"]) * (32 if gpu.vendor == "nvidia" else 64)
    reserved = 1024  # bytes of shared memory the driver keeps for each program
    fits = min(
        gpu.smem_per_sm // (decode_latent_smem_bytes(problem, knobs, gpu) + reserved),
        gpu.registers_per_sm // (256 * threads),
    )
    return max(1, fits)
