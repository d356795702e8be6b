"""What a config must fulfil to be right on a device: one plain function per family.

Asked by the families while tuning and again by the exported module for neighbouring shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .problem import Problem


def prefill_unsupported(problem: Problem, gpu: Any) -> str | None:
    """Why the portable prefill kernels cannot serve the problem on the GPU, or None."""
    p = problem
    if p.op != "prefill":
        return f"serves prefill, not {p.op}"
    if p.lengths != "equal" and not (p.varlen or p.paged):
        return "sequences of different lengths must be packed, in layout thd"
    if p.head_dim_v % 8 or not 16 <= p.head_dim_v <= 256:
        return f"head_dim_v {p.head_dim_v} is not a multiple of 8 from 16 to 256"
    if p.kv_dtype != p.dtype or p.out_dtype != p.dtype:
        return f"kv_dtype {p.kv_dtype} and out_dtype {p.out_dtype} are not both dtype {p.dtype}"
    if gpu.vendor == "nvidia" and gpu.capability < 80:
        return f"{gpu.arch} is older than sm_80"  # bf16 and asynchronous copies begin there
    return None


def prefill_refusal(problem: Problem, knobs: Mapping[str, Any], gpu: Any) -> str | None:
    """Why these knobs cannot serve the problem on the GPU, or None."""
    reason = prefill_unsupported(problem, gpu)
    if reason:
        return reason
    if knobs["LOAD"] == "descriptor" and gpu.capability < 90:
        return f"tensor descriptors need sm_90, this is {gpu.arch}"
    if knobs["LOAD"] == "descriptor" and problem.paged and not prefill_one_page(problem, knobs):
        return "a descriptor names keys of one page, and a tile of keys may lie in several"
    if problem.masked_by == "blocks":
        sizes = (("BLOCK_M", problem.mask_block_q), ("BLOCK_N", problem.mask_block_k))
        for name, size in sizes:
            if size % knobs[name]:
                return f"{name} {knobs[name]} does not divide the mask's blocks of {size}"
    smem_bytes = prefill_smem_bytes(problem, knobs, gpu)
    if smem_bytes > gpu.smem_per_block:
        return (
            f"{smem_bytes} bytes of shared memory, a block of {gpu.arch} has {gpu.smem_per_block}"
        )
    return None


def prefill_one_page(problem: Problem, knobs: Mapping[str, Any]) -> bool:
    """Whether every tile of keys lies in one page; those of a window begin anywhere."""
    return not problem.windowed and problem.page_size % knobs["BLOCK_N"] == 0


def prefill_fma_products(problem: Problem, gpu: Any) -> bool:
    """Whether the products run on the ordinary cores: fp32 as fp32 has no tensor core on NVIDIA."""
    return problem.dtype == "fp32" and gpu.vendor == "nvidia"


def prefill_warpgroup_products(problem: Problem, gpu: Any) -> bool:
    """Whether the products are those of whole warpgroups, with both operands in shared memory."""
    return problem.dtype != "fp32" and 90 <= gpu.capability < 120  # sm_120 has those of sm_80


def prefill_smem_bytes(problem: Problem, knobs: Mapping[str, Any], gpu: Any) -> int:
    """A bound of the shared memory a program takes, found from what triton 3.6 compiles.

    Warpgroup products read q and every stage of k and v there. Others hold one buffer less than
    stages, and may pass p through it. AMD keeps q in registers once it is loaded. Tiles of a bias,
    whose type is q's, and the ids of keys are fetched ahead as those of k are. What dropout keeps
    changes hands between threads, a byte an element.
    """
    bias = max(2, knobs["num_stages"] - 1) * knobs["BLOCK_M"] * knobs["BLOCK_N"]
    bias_bytes = bias * problem.dtype_bytes if problem.bias else 0
    ids_bytes = 4 * knobs["num_stages"] * knobs["BLOCK_N"] * (problem.masked_by == "documents")
    kept_bytes = knobs["BLOCK_M"] * knobs["BLOCK_N"] * problem.dropout
    return bias_bytes + ids_bytes + kept_bytes + _prefill_plain_smem_bytes(problem, knobs, gpu)


def _prefill_plain_smem_bytes(problem: Problem, knobs: Mapping[str, Any], gpu: Any) -> int:
    """The same without what modifiers take."""
    block_d, block_dv = prefill_blocks_d(problem)
    block_m, block_n, stages = knobs["BLOCK_M"], knobs["BLOCK_N"], knobs["num_stages"]
    q_tile = block_m * block_d * problem.dtype_bytes
    k_and_v = block_n * (block_d + block_dv) * problem.dtype_bytes
    wider = block_n * max(block_d, block_dv) * problem.dtype_bytes
    p_tile = block_m * block_n * problem.dtype_bytes
    if gpu.vendor == "amd":
        return max(q_tile, wider, (stages - 1) * k_and_v + p_tile)
    scratch = 1024  # barriers, and reductions across warps
    if prefill_fma_products(problem, gpu):
        return q_tile + max(wider, (stages - 1) * k_and_v) + p_tile + scratch
    if prefill_warpgroup_products(problem, gpu):
        if stages == 1:
            return q_tile + wider + 5 * scratch
        return q_tile + stages * k_and_v + scratch
    # warps that divide the channels instead of the rows exchange p
    passed = p_tile if block_dv > block_m else 0
    return q_tile + max(wider, (stages - 1) * k_and_v) + passed + scratch


def prefill_blocks_d(problem: Problem) -> tuple[int, int]:
    """Channels of tiles of q and k, and of v, as plan() of the rendered text pads them."""
    return 1 << (problem.head_dim - 1).bit_length(), 1 << (problem.head_dim_v - 1).bit_length()


DECODE_GROUP_BATCH = 1024  # sequences whose lengths a program of the group schedule adds up


def decode_unsupported(problem: Problem, gpu: Any) -> str | None:
    """Why the portable decode kernels cannot serve the problem on the GPU, or None."""
    p = problem
    if p.op != "decode":
        return f"serves decode, not {p.op}"
    if p.head_dim_v != p.head_dim:
        return f"head_dim_v {p.head_dim_v} is not head_dim {p.head_dim}"
    if p.quantised and p.dtype == "fp32":
        return f"kv_dtype {p.kv_dtype} is served for queries of 16 bits, not fp32"
    if (p.kv_dtype != p.dtype and not p.quantised) or p.out_dtype != p.dtype:
        return f"kv_dtype {p.kv_dtype} and out_dtype {p.out_dtype} are not both dtype {p.dtype}"
    if p.batch_invariant:
        return "batch_invariant is not served yet: the number of splits depends on the batch"
    if gpu.vendor == "nvidia" and gpu.capability < 80:
        return f"{gpu.arch} is older than sm_80"  # bf16 and asynchronous copies begin there
    return None


def decode_refusal(problem: Problem, knobs: Mapping[str, Any], gpu: Any) -> str | None:
    """Why these knobs cannot serve the problem on the GPU, or None."""
    reason = decode_unsupported(problem, gpu)
    if reason:
        return reason
    if knobs["SCHEDULE"] == "group" and problem.batch > DECODE_GROUP_BATCH:
        return f"the group schedule adds up at most {DECODE_GROUP_BATCH} lengths"
    if knobs["DEPENDENT_LAUNCH"] and gpu.capability < 90:
        return f"dependent launch needs sm_90, this is {gpu.arch}"
    if knobs["SWAP"]:
        if gpu.capability != 90:
            return f"the swapped product is made for sm_90, this is {gpu.arch}"
        if problem.quantised:
            return "the swapped product reads V as it is stored, quantised bytes are widened first"
        if problem.dtype == "fp32":
            return "the swapped product is made for 16-bit inputs"
        if knobs["BLOCK_N"] < 64 or decode_block_d(problem) < 64 or knobs["num_warps"] != 4:
            return "the swapped product needs 64 keys, 64 channels and 4 warps"
    smem_bytes = decode_smem_bytes(problem, knobs, gpu)
    if smem_bytes > gpu.smem_per_block:
        return (
            f"{smem_bytes} bytes of shared memory, a block of {gpu.arch} has {gpu.smem_per_block}"
        )
    return None


def decode_block_d(problem: Problem) -> int:
    """Channels of a tile, as plan() of the rendered text pads them."""
    return max(32 if problem.quantised else 16, 1 << (problem.head_dim - 1).bit_length())


def decode_block_m(problem: Problem) -> int:
    """Rows of a tile, heads times query tokens, as plan() of the rendered text pads them."""
    rows = 1 << (problem.group_size * problem.seqlen_q - 1).bit_length()
    return max(16, min(rows, 128, 16384 // (decode_block_d(problem) * problem.dtype_bytes)))


def decode_is_wide(problem: Problem) -> bool:
    """Whether the result of a tile is so large that eight warps must share it."""
    return decode_block_m(problem) * decode_block_d(problem) > 4096


def decode_ring_bytes(problem: Problem, knobs: Mapping[str, Any], gpu: Any) -> int:
    """Shared memory of the tiles of K and V that are in flight.

    A product of sm_90's warp groups reads its tile from shared memory, others from registers, as is
    what widens a quantised tile: their last stage takes no room in the ring.
    """
    in_place = _decode_warp_group(problem, knobs, gpu) and not problem.quantised
    stages = knobs["num_stages"] - (0 if in_place else 1)
    row = decode_block_d(problem) * problem.kv_dtype_bytes
    if problem.kv_scales == "token":
        row += 4
    return 2 * knobs["BLOCK_N"] * row * max(1, stages)


def decode_smem_bytes(problem: Problem, knobs: Mapping[str, Any], gpu: Any) -> int:
    """A bound of the shared memory that a program takes: never less than what is compiled.

    A tile of a bias changes hands to lie as scores do; one of fp32 is fetched ahead as well. How
    keys are seen changes hands where blocks of a mask end inside of tiles.
    """
    block_m, block_d = decode_block_m(problem), decode_block_d(problem)
    q_and_p = block_m * (block_d + knobs["BLOCK_N"]) * problem.dtype_bytes
    if problem.bias:
        ahead = max(1, knobs["num_stages"] - 1) if problem.dtype == "fp32" else 1
        q_and_p += block_m * knobs["BLOCK_N"] * problem.dtype_bytes * ahead
    if blocks_end_inside(problem, knobs):
        q_and_p += 2 * block_m * knobs["BLOCK_N"]
    result = 4 * block_m * block_d  # fp32 rows change hands between threads to be stored
    if problem.quantised and _decode_warp_group(problem, knobs, gpu):
        q_and_p += 2 * knobs["BLOCK_N"] * block_d * problem.dtype_bytes  # widened, and put back
    return max(decode_ring_bytes(problem, knobs, gpu) + q_and_p, result) + 1024


def blocks_end_inside(problem: Problem, knobs: Mapping[str, Any]) -> bool:
    """Whether a tile of keys of a decode may lie in several of a mask's blocks."""
    return problem.masked_by == "blocks" and problem.mask_block_k % knobs["BLOCK_N"] != 0


def _decode_warp_group(problem: Problem, knobs: Mapping[str, Any], gpu: Any) -> bool:
    """Whether a product is that of a whole warp group, which reads K and V in shared memory."""
    rows = decode_block_m(problem) >= 64 and knobs["num_warps"] >= 4
    has_them = 90 <= gpu.capability < 120 and problem.dtype != "fp32"  # sm_120 has those of sm_80
    return has_them and bool(knobs["SWAP"] or rows)
