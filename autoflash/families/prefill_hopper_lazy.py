"""The Hopper prefill that rescales its sums only where their maximum is exceeded by much."""

from functools import lru_cache

from autoflash.config import Config
from autoflash.families import prefill_hopper
from autoflash.families.family import Family
from autoflash.gpu import Gpu
from autoflash.problem import Problem, Variant
from autoflash.runtime.hopper_validity import (
    prefill_hopper_default,
    prefill_hopper_refusal,
    prefill_hopper_unsupported,
)

LAZY = {"prefill_hopper/softmax.py.jinja": "prefill_hopper/lazy_softmax.py.jinja"}
PARTS = tuple(LAZY.get(part, part) for part in prefill_hopper.PARTS)
FEWEST_BLOCKS = 4  # of keys; before the first one of a tile there is nothing to rescale


def variant(problem: Problem) -> Variant:
    return Variant(family="prefill_hopper_lazy", op="prefill", causal=problem.causal)


@lru_cache
def default(problem: Problem, gpu: Gpu) -> Config:
    return Config.of("prefill_hopper_lazy", prefill_hopper_default(problem, gpu))


def refusal(problem: Problem, config: Config, gpu: Gpu) -> str | None:
    """Why the config is wrong for the problem, or cannot be fast; None for a candidate."""
    wrong = prefill_hopper_unsupported(problem, gpu)
    if wrong:
        return wrong
    if config == default(problem, gpu):
        return None
    if problem.seqlen_k <= FEWEST_BLOCKS * int(config["BLOCK_N"]):
        return f"at most {FEWEST_BLOCKS} blocks of keys, whose sums are rescaled few times anyway"
    return prefill_hopper.slow_or_wrong(problem, config, gpu)


FAMILY = Family(
    name="prefill_hopper_lazy",
    op="prefill",
    parts=PARTS,
    knobs=prefill_hopper.KNOBS,
    variant=variant,
    unsupported=prefill_hopper_unsupported,
    misfit=prefill_hopper_refusal,
    refusal=refusal,
    default=default,
    interpretable=False,
    slow_to_compile=True,
)
