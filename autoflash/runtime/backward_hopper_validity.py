"""What the knobs of the Hopper backward must fulfil on a device, and its defaults.

Asked by the families while tuning and again by the exported module for neighbouring shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .hopper_validity import hopper_block_d
from .problem import Problem

# Of a consumer's 240 registers, those that hold sums and scores: with more it spills in its loop.
BACKWARD_HOPPER_MAX_LIVE = 215
BACKWARD_HOPPER_BARRIER_BYTES = 1024
BACKWARD_HOPPER_PADDED_ROWS = 128  # as plan() of the rendered text pads lse and delta


def backward_hopper_unsupported(problem: Problem, gpu: Any) -> str | None:
    """Why the Hopper backward kernels cannot serve the problem on the GPU, or None."""
    p = problem
    if p.op != "backward":
        return f"serves backward, not {p.op}"
    if p.paged:
        return "keys in pages are not served"
    if p.varlen:
        return "packed sequences: the portable family's"
    if p.lengths != "equal":
        return "sequences of different lengths are not served"
    if p.windowed or p.modifiers or p.masks:
        names = (*["windows"] * p.windowed, *p.modifiers, *p.masks)
        return f"{', '.join(names)}: the portable family's"
    if gpu.vendor != "nvidia" or gpu.capability != 90:
        return f"its products and barriers are of sm_90 alone, this is {gpu.arch}"
    if p.dtype not in ("bf16", "fp16"):
        return f"the products of a warpgroup round {p.dtype}; bf16 and fp16 are served"
    if p.kv_dtype != p.dtype or p.out_dtype != p.dtype:
        return f"kv_dtype {p.kv_dtype} and out_dtype {p.out_dtype} are not both dtype {p.dtype}"
    if p.head_dim_v != p.head_dim:
        return f"head_dim_v {p.head_dim_v} is not head_dim {p.head_dim}"
    if p.head_dim <= 32:
        return f"half of the narrowest tile, 64 channels, lies past head_dim {p.head_dim}"
    if p.batch * p.num_heads * _backward_hopper_padded_q(p) >= 1 << 31:
        return "its descriptors count the rows of all heads in 31 bits"
    return None


def backward_hopper_refusal(problem: Problem, knobs: Mapping[str, Any], gpu: Any) -> str | None:
    """Why these knobs cannot serve the problem on the GPU, or None."""
    reason = backward_hopper_unsupported(problem, gpu)
    if reason:
        return reason
    live = {
        "dk and dv": backward_hopper_kv_live(problem, knobs["KV_BLOCK_M"], single=False),
        "dq": backward_hopper_q_live(problem, knobs),
    }
    smem_bytes = {
        "dk and dv": backward_hopper_kv_smem_bytes(problem, knobs["KV_BLOCK_M"], ds_slots=0),
        "dq": backward_hopper_q_smem_bytes(problem, knobs),
    }
    if knobs["Q_PREFETCH"] and knobs["Q_K_STAGES"] < 2:
        return "a step's keys are read again in the next step: one slot waits for itself"
    return _backward_hopper_misfit(live, smem_bytes, gpu)


def backward_hopper_single_unsupported(problem: Problem, gpu: Any) -> str | None:
    """Why the single pass cannot serve the problem on the GPU, or None."""
    p = problem
    if p.deterministic:
        return "dq is added up in an order that no two runs share"
    reason = backward_hopper_unsupported(problem, gpu)
    if reason:
        return reason
    if p.head_dim > 128:
        return f"the sums of dk, dv and dq of {p.head_dim} channels are more than the registers"
    if p.group_size * _backward_hopper_padded_q(p) * hopper_block_d(p) >= 1 << 31:
        return "it counts the sums of dq of a group of heads in 31 bits"
    return None


def backward_hopper_single_refusal(
    problem: Problem, knobs: Mapping[str, Any], gpu: Any
) -> str | None:
    """Why these knobs cannot serve the problem on the GPU in a single pass, or None."""
    reason = backward_hopper_single_unsupported(problem, gpu)
    if reason:
        return reason
    block_m, ds_slots, kv_slots = (knobs[name] for name in ("KV_BLOCK_M", "DS_SLOTS", "KV_SLOTS"))
    if ds_slots < 2:
        return "a tile of ds is read in the next step: one slot waits for itself"
    live = {"the pass": backward_hopper_kv_live(problem, block_m, single=True)}
    smem_bytes = {"the pass": backward_hopper_kv_smem_bytes(problem, block_m, ds_slots, kv_slots)}
    return _backward_hopper_misfit(live, smem_bytes, gpu)


def backward_hopper_kv_live(problem: Problem, block_m: int, single: bool) -> int:
    """Registers of a thread that hold sums and scores of 64 keys in the kernel of dk and dv."""
    block_d = hopper_block_d(problem)
    if block_d == 256:  # a warpgroup sums one of them, and holds one product of scores
        return block_d // 2 + block_m // 2
    scores = block_m  # of two products
    # p and ds as operands of half the width, beside what the warpgroup has of dq
    handed = block_m // 2 + (block_d // 4 if block_m == 64 else block_d // 2)
    return block_d + (max(scores, handed) if single else scores)


def backward_hopper_q_live(problem: Problem, knobs: Mapping[str, Any]) -> int:
    """The same of 64 queries in the kernel of dq."""
    block_n = knobs["Q_BLOCK_N"]
    scores = block_n + (block_n // 4 if knobs["Q_PREFETCH"] else 0)
    return hopper_block_d(problem) // 2 + scores


def backward_hopper_kv_smem_bytes(
    problem: Problem, block_m: int, ds_slots: int, kv_slots: int = 0
) -> int:
    """A bound of the shared memory that a program of dk and dv takes."""
    block_d, size = hopper_block_d(problem), problem.dtype_bytes
    keys = 64 if block_d == 256 else 128
    own = max(1, kv_slots) * 2 * keys * block_d * size
    rings = 2 * 2 * block_m * (block_d * size + 4)  # a number with every row
    handed = (1 if block_d == 256 else 2 * ds_slots) * 64 * block_m * size
    return own + rings + handed + BACKWARD_HOPPER_BARRIER_BYTES


def backward_hopper_q_smem_bytes(problem: Problem, knobs: Mapping[str, Any]) -> int:
    """A bound of the shared memory that a program of dq takes."""
    row = hopper_block_d(problem) * problem.dtype_bytes
    stages = knobs["Q_K_STAGES"] + knobs["Q_V_STAGES"]
    return 2 * 128 * row + stages * knobs["Q_BLOCK_N"] * row + BACKWARD_HOPPER_BARRIER_BYTES


def _backward_hopper_padded_q(problem: Problem) -> int:
    rows = BACKWARD_HOPPER_PADDED_ROWS
    return -(-problem.seqlen_q // rows) * rows


def _backward_hopper_misfit(
    live: Mapping[str, int], smem_bytes: Mapping[str, int], gpu: Any
) -> str | None:
    for part, registers in live.items():
        if registers > BACKWARD_HOPPER_MAX_LIVE:
            return f"{registers} registers of sums and scores for {part} spill in its loop"
    for part, size in smem_bytes.items():
        if size > gpu.smem_per_block:
            return (
                f"{size} bytes of shared memory for {part},"
                f" a block of {gpu.arch} has {gpu.smem_per_block}"
            )
    return None


# H200, by channels of a tile and causal: the fastest of its prototypes there. KV_BLOCK_M, KV_BIAS,
# KV_VOLATILE, Q_BLOCK_N, Q_K_STAGES, Q_V_STAGES, Q_PREFETCH, Q_VOLATILE.
BACKWARD_HOPPER_DEFAULTS: dict[tuple[int, bool], tuple[int, ...]] = {
    (64, True): (128, 1, 1, 128, 2, 2, 0, 1),
    (64, False): (128, 1, 1, 128, 2, 2, 0, 1),
    (128, True): (64, 1, 1, 64, 3, 2, 1, 0),
    (128, False): (64, 1, 1, 64, 3, 2, 1, 0),
    (256, True): (64, 1, 0, 64, 2, 1, 0, 0),
    (256, False): (64, 1, 0, 64, 2, 1, 0, 0),
}
BACKWARD_HOPPER_KNOBS = (
    "KV_BLOCK_M",
    "KV_BIAS",
    "KV_VOLATILE",
    "Q_BLOCK_N",
    "Q_K_STAGES",
    "Q_V_STAGES",
    "Q_PREFETCH",
    "Q_VOLATILE",
)
# The same of the single pass: KV_BLOCK_M, KV_BIAS, DS_SLOTS, DQ_FIRST, KV_SLOTS.
BACKWARD_HOPPER_SINGLE_DEFAULTS: dict[tuple[int, bool], tuple[int, ...]] = {
    (64, True): (64, 1, 2, 1, 2),
    (64, False): (128, 1, 2, 1, 2),
    (128, True): (64, 1, 2, 1, 2),
    (128, False): (64, 1, 4, 1, 0),
}
BACKWARD_HOPPER_SINGLE_KNOBS = ("KV_BLOCK_M", "KV_BIAS", "DS_SLOTS", "DQ_FIRST", "KV_SLOTS")


def backward_hopper_default(problem: Problem, gpu: Any) -> dict[str, int | str]:
    """Knobs that backward_hopper_refusal accepts wherever the problem is served."""
    values = BACKWARD_HOPPER_DEFAULTS[hopper_block_d(problem), problem.causal]
    return dict(zip(BACKWARD_HOPPER_KNOBS, values, strict=True))


def backward_hopper_single_default(problem: Problem, gpu: Any) -> dict[str, int | str]:
    """The same for the single pass."""
    values = BACKWARD_HOPPER_SINGLE_DEFAULTS[hopper_block_d(problem), problem.causal]
    return dict(zip(BACKWARD_HOPPER_SINGLE_KNOBS, values, strict=True))
