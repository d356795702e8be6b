"""The portable decode family: split-KV in Triton, contiguous and paged, with its combine."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from autoflash.config import Config, Knob
from autoflash.families.family import Family
from autoflash.gpu import Gpu
from autoflash.problem import SWITCHES, Problem, Variant
from autoflash.runtime.defaults import decode_default, decode_programs_per_sm
from autoflash.runtime.problem import CHOSEN, MODIFIERS
from autoflash.runtime.validity import (
    decode_block_d,
    decode_is_wide,
    decode_refusal,
    decode_ring_bytes,
    decode_unsupported,
)

PARTS = (
    "triton_header.py.jinja",
    "decode/tiles.py.jinja",
    "shared/softcap.py.jinja",
    "shared/masks.py.jinja",
    "decode/documents.py.jinja",
    "decode/blocks.py.jinja",
    "decode/modifiers.py.jinja",
    "decode/quantised.py.jinja",
    "decode/attend.py.jinja",
    "decode/attend_swapped.py.jinja",
    "decode/attend_pairs.py.jinja",
    "decode/attend_latent.py.jinja",
    "decode/schedule.py.jinja",
    "decode/prefetch.py.jinja",
    "decode/store.py.jinja",
    "decode/merge.py.jinja",
    "decode/kernel.py.jinja",
    "decode/kernel_quantised.py.jinja",
    "decode/kernel_latent.py.jinja",
    "decode/combine.py.jinja",
    "decode/plan.py.jinja",
    "decode/plan_modified.py.jinja",
)

KNOBS = (
    Knob("SCHEDULE", ("split", "group")),
    Knob("SWAP", (1, 0)),
    Knob("BLOCK_N", (64, 128, 32, 16)),
    Knob("num_warps", (4, 2, 8)),
    Knob("num_stages", (3, 2, 4)),
    Knob("PROGRAMS_PER_SM", (1, 2, 3, 4, 5, 6, 7, 8), compiled=False),
    Knob("DEPENDENT_LAUNCH", (1, 0)),
    Knob("COMBINE_WARPS", (4, 2, 1)),
)

# Of an SM's shared memory, at least this much must be K and V in flight to reach its share of the
# memory's rate: 64 of 228 KB on an H200.
RING_SHARE = 64 / 228


def variant(problem: Problem) -> Variant:
    return decode_variant("decode", problem)


def decode_variant(family: str, problem: Problem) -> Variant:
    """One text has all modifiers: what a call has not is None, of which no trace is compiled.

    A bias, which has an axis of keys, takes the place of slopes in a text of its own, and each rule
    of a mask, documents and prefixes have texts of their own, of these modifiers too.
    """
    on = {*problem.switches}
    modified = bool(on & {"window", *MODIFIERS, CHOSEN} or problem.masks)
    switches = {name: True for name in SWITCHES if name in on - {"window", *MODIFIERS}}
    switches |= {"bias": problem.bias, "modified": modified}
    return Variant(family, "decode", mask=problem.mask, **switches)


def refusal(problem: Problem, config: Config, gpu: Gpu) -> str | None:
    """Why the config cannot serve the problem on this GPU, or is known to be slow; or None."""
    knobs = config.as_dict()
    reason = decode_refusal(problem, knobs, gpu)
    if reason is None and config != default(problem, gpu):
        reason = _slow(problem, knobs, gpu)
    return reason


def _slow(problem: Problem, knobs: Mapping[str, Any], gpu: Gpu) -> str | None:
    """Why a valid config is not worth measuring, or None."""
    if knobs["SCHEDULE"] == "group" and problem.batch == 1:
        return "one sequence needs no group schedule"
    if not knobs["DEPENDENT_LAUNCH"] and gpu.vendor == "nvidia" and gpu.capability >= 90:
        return "dependent launch is never slower where the GPU has it"
    rows = problem.batch * problem.num_heads * problem.seqlen_q
    if knobs["COMBINE_WARPS"] == 1 and rows > gpu.num_sms:
        return "a warp alone merges faster only where others have nothing to do"
    if not knobs["SWAP"]:
        per_thread = knobs["BLOCK_N"] * decode_block_d(problem) // (knobs["num_warps"] * 32)
        keys_per_warp = knobs["BLOCK_N"] // knobs["num_warps"]
        if problem.dtype == "fp32":
            if per_thread > 32:
                return "without tensor cores a product so large spills and takes long to compile"
        elif keys_per_warp != 16 and not (decode_is_wide(problem) and knobs["num_warps"] == 8):
            return "a warp of a plain product works on 16 keys, or eight share a wide result"
        if knobs["num_stages"] == 2 and knobs["BLOCK_N"] > 32:
            return "two stages of a plain product leave one tile in flight"
    fits = decode_programs_per_sm(problem, knobs, gpu)
    if knobs["PROGRAMS_PER_SM"] not in (1, fits):
        return f"programs per SM are 1 or the {fits} that fit"
    ring = decode_ring_bytes(problem, knobs, gpu) * knobs["PROGRAMS_PER_SM"]
    if knobs["PROGRAMS_PER_SM"] < fits and ring < gpu.smem_per_sm * RING_SHARE:
        return f"{ring} bytes in flight on an SM are too few to reach the memory's rate"
    return None


@lru_cache
def default(problem: Problem, gpu: Gpu) -> Config:
    return Config.of("decode", decode_default(problem, gpu))


FAMILY = Family(
    name="decode",
    op="decode",
    parts=PARTS,
    knobs=KNOBS,
    variant=variant,
    unsupported=decode_unsupported,
    misfit=decode_refusal,
    refusal=refusal,
    default=default,
)
