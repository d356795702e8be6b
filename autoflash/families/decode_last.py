"""Decode without a second kernel: the program that ends last merges the parts of a sequence."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from autoflash.config import Config
from autoflash.families import decode
from autoflash.families.family import Family
from autoflash.gpu import Gpu
from autoflash.problem import Problem, Variant
from autoflash.runtime.defaults import decode_last_default
from autoflash.runtime.validity import decode_refusal, decode_unsupported

COMBINE = {"COMBINE_WARPS": 4}  # of the kernel that there is not
PARTS = decode.PARTS
KNOBS = tuple(knob for knob in decode.KNOBS if knob.name not in COMBINE)


def variant(problem: Problem) -> Variant:
    return decode.decode_variant("decode_last", problem)


def refusal(problem: Problem, config: Config, gpu: Gpu) -> str | None:
    """Why the config cannot serve the problem on this GPU, or is known to be slow; or None."""
    knobs = config.as_dict()
    if config == default(problem, gpu):
        return decode_refusal(problem, knobs, gpu)
    return _slow(problem, knobs, gpu)


def _slow(problem: Problem, knobs: Mapping[str, Any], gpu: Gpu) -> str | None:
    """Why the config is wrong or not worth measuring, or None."""
    sequences = problem.batch * problem.num_kv_heads
    if sequences < gpu.num_sms:
        return "few programs would merge while the rest of the GPU waits"
    if knobs["SCHEDULE"] == "split" and 2 * sequences > gpu.num_sms * knobs["PROGRAMS_PER_SM"]:
        return "no sequence is cut, and nothing is left to merge"
    return decode.refusal(problem, Config.of("decode", {**knobs, **COMBINE}), gpu)


@lru_cache
def default(problem: Problem, gpu: Gpu) -> Config:
    return Config.of("decode_last", decode_last_default(problem, gpu))


FAMILY = Family(
    name="decode_last",
    op="decode",
    parts=PARTS,
    knobs=KNOBS,
    variant=variant,
    unsupported=decode_unsupported,
    misfit=decode_refusal,
    refusal=refusal,
    default=default,
)
