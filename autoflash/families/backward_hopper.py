"""The backward family for Hopper, in Gluon: dk and dv by tiles of keys, then dq by queries."""

from autoflash.config import Config, Knob
from autoflash.families.family import Family
from autoflash.gpu import Gpu
from autoflash.problem import Problem, Variant
from autoflash.runtime.backward_hopper_validity import (
    backward_hopper_default,
    backward_hopper_refusal,
    backward_hopper_unsupported,
)
from autoflash.runtime.hopper_validity import hopper_block_d

SHARED_PARTS = (
    "gluon_header.py.jinja",
    "backward_hopper/dependents.py.jinja",
    "shared/gluon_copies.py.jinja",
    "backward_hopper/work.py.jinja",
    "backward_hopper/rings.py.jinja",
    "backward_hopper/statistics.py.jinja",
    "backward_hopper/query_range.py.jinja",
)
PLAN_PARTS = (
    "prefill_hopper/rows.py.jinja",
    "backward_hopper/numbers.py.jinja",
    "prefill_hopper/descriptors.py.jinja",
    "backward_hopper/plan.py.jinja",
)
PARTS = (
    *SHARED_PARTS,
    "backward_hopper/producer.py.jinja",
    "backward_hopper/keys_rings.py.jinja",
    "backward_hopper/keys.py.jinja",
    "backward_hopper/keys_consumer.py.jinja",
    "backward_hopper/keys_kernel.py.jinja",
    "backward_hopper/roles.py.jinja",
    "backward_hopper/queries.py.jinja",
    "backward_hopper/queries_kernel.py.jinja",
    *PLAN_PARTS,
)

KNOBS = (
    Knob("KV_BLOCK_M", (64, 128)),
    Knob("KV_BIAS", (1, 0)),
    Knob("KV_VOLATILE", (1, 0)),
    Knob("Q_BLOCK_N", (64, 128)),
    Knob("Q_K_STAGES", (2, 3)),
    Knob("Q_V_STAGES", (2, 1)),
    Knob("Q_PREFETCH", (0, 1)),
    Knob("Q_VOLATILE", (0, 1)),
)


def variant(problem: Problem) -> Variant:
    return Variant(family="backward_hopper", op="backward", causal=problem.causal)


def default(problem: Problem, gpu: Gpu) -> Config:
    return Config.of("backward_hopper", backward_hopper_default(problem, gpu))


def refusal(problem: Problem, config: Config, gpu: Gpu) -> str | None:
    """Why the config is wrong for the problem, or has no chance to be fast; None for a candidate.

    The default is always a candidate: it is what the others must beat.
    """
    knobs = config.as_dict()
    wrong = backward_hopper_refusal(problem, knobs, gpu)
    if wrong or knobs == backward_hopper_default(problem, gpu):
        return wrong
    return hopeless_keys(problem, knobs) or _hopeless_queries(problem, knobs, gpu)


def hopeless_keys(problem: Problem, knobs: dict) -> str | None:
    """Why the kernel of dk and dv cannot be fast, or None. A neighbouring shape is not held to it.

    What is said of speed was measured on an H200.
    """
    block_d, block_m = hopper_block_d(problem), knobs["KV_BLOCK_M"]
    if block_m == 128 and problem.seqlen_q <= 64:
        return f"half of {block_m} query rows lie past the {problem.seqlen_q}"
    if not knobs["KV_BIAS"] and (block_d > 64 or block_m > 64):
        # 7 to 14 % slower, but for 64 queries of 64 channels
        return "scores begin at -lse where that is faster"
    if block_d == 256 and knobs.get("KV_VOLATILE"):
        return "the two roles wait for each other where exponentials could be moved"
    return None


def _hopeless_queries(problem: Problem, knobs: dict, gpu: Gpu) -> str | None:
    """The same of the kernel of dq."""
    block_d, block_n = hopper_block_d(problem), knobs["Q_BLOCK_N"]
    if block_n == 128 and problem.seqlen_k <= 64:
        return f"half of {block_n} keys lie past the {problem.seqlen_k}"
    if knobs["Q_VOLATILE"] and (block_d > 64 or knobs["Q_PREFETCH"]):
        return "exponentials that stay before a wait pay at 64 channels without prefetch"
    if knobs["Q_V_STAGES"] == 1:
        two = {**knobs, "Q_V_STAGES": 2}
        if backward_hopper_refusal(problem, two, gpu) is None:
            return "one tile of V in flight overlaps no load, and two fit"
    if knobs["Q_K_STAGES"] == 3 and not knobs["Q_PREFETCH"]:
        return "a third tile of K pays where the next step reads it again"
    return None


FAMILY = Family(
    name="backward_hopper",
    op="backward",
    parts=PARTS,
    knobs=KNOBS,
    variant=variant,
    unsupported=backward_hopper_unsupported,
    misfit=backward_hopper_refusal,
    refusal=refusal,
    default=default,
    interpretable=False,
    slow_to_compile=True,
)
