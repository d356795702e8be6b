"""Decode of latent attention: values are the first channels of the keys, and loaded once."""

from dataclasses import replace

from autoflash.config import Config, Knob
from autoflash.families import decode
from autoflash.families.family import Family
from autoflash.gpu import Gpu
from autoflash.problem import Problem, Variant
from autoflash.runtime.latent_validity import (
    decode_latent_default,
    decode_latent_programs_per_sm,
    decode_latent_refusal,
    decode_latent_rows,
    decode_latent_unsupported,
)

PARTS = decode.PARTS
KNOBS = (
    Knob("SCHEDULE", ("split", "group")),
    Knob("BLOCK_M", (64, 32, 16)),
    Knob("BLOCK_N", (64, 32, 16)),
    Knob("num_warps", (8, 4)),
    Knob("num_stages", (2, 3, 4)),
    Knob("PROGRAMS_PER_SM", (1, 2), compiled=False),
    Knob("DEPENDENT_LAUNCH", (1, 0)),
    Knob("COMBINE_WARPS", (4, 2)),
)
MAX_LIVE = 128  # of a thread's 255 registers: twice as many were seen to spill 2 KB


def variant(problem: Problem) -> Variant:
    """One text for one query token and several: products have rows to spare."""
    return replace(decode.decode_variant("decode_latent", problem), queries=True)


def refusal(problem: Problem, config: Config, gpu: Gpu) -> str | None:
    """Why the config cannot serve the problem on this GPU, or is known to be slow; or None."""
    knobs = config.as_dict()
    reason = decode_latent_refusal(problem, knobs, gpu)
    if reason is None and knobs != decode_latent_default(problem, gpu):
        reason = _slow(problem, knobs, gpu)
    return reason


def _slow(problem: Problem, knobs: dict, gpu: Gpu) -> str | None:
    """Why a valid config is not worth measuring, or None."""
    if knobs["SCHEDULE"] == "group" and problem.batch == 1:
        return "one sequence needs no group schedule"
    if not knobs["DEPENDENT_LAUNCH"] and gpu.vendor == "nvidia" and gpu.capability >= 90:
        return "dependent launch is never slower where the GPU has it"
    if knobs["BLOCK_M"] > decode_latent_rows(problem):
        return f"half of BLOCK_M {knobs['BLOCK_M']} and more would be padding"
    live = knobs["BLOCK_M"] * problem.head_dim_v // (knobs["num_warps"] * 32)
    if live > MAX_LIVE:
        return f"a thread holds {live} values of the result, more than {MAX_LIVE}"
    if knobs["num_warps"] == 8 and knobs["BLOCK_M"] == 16:
        return "four warps are enough for 16 rows"
    fits = decode_latent_programs_per_sm(problem, knobs, gpu)
    if knobs["PROGRAMS_PER_SM"] not in (1, fits):
        return f"programs per SM are 1 or the {fits} that fit"
    return None


def default(problem: Problem, gpu: Gpu) -> Config:
    return Config.of("decode_latent", decode_latent_default(problem, gpu))


FAMILY = Family(
    name="decode_latent",
    op="decode",
    parts=PARTS,
    knobs=KNOBS,
    variant=variant,
    unsupported=decode_latent_unsupported,
    misfit=decode_latent_refusal,
    refusal=refusal,
    default=default,
    max_spills=448,  # 64 rows spill some hundred bytes: what that costs is measured
)
