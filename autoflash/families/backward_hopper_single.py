"""The Hopper backward in a single pass: the kernel of dk and dv adds up dq too, in fp32."""

from autoflash.config import Config, Knob
from autoflash.families import backward_hopper
from autoflash.families.family import Family
from autoflash.gpu import Gpu
from autoflash.problem import Problem, Variant
from autoflash.runtime.backward_hopper_validity import (
    backward_hopper_single_default,
    backward_hopper_single_refusal,
    backward_hopper_single_unsupported,
)

PARTS = (
    *backward_hopper.SHARED_PARTS,
    "backward_hopper/units.py.jinja",
    "backward_hopper/single_producer.py.jinja",
    "backward_hopper/keys.py.jinja",
    "backward_hopper/sums.py.jinja",
    "backward_hopper/single_consumer.py.jinja",
    "backward_hopper/single_kernel.py.jinja",
    *backward_hopper.PLAN_PARTS,
)
KNOBS = (
    Knob("KV_BLOCK_M", (64, 128)),
    Knob("KV_BIAS", (1, 0)),
    Knob("DS_SLOTS", (2, 4)),
    Knob("DQ_FIRST", (1, 0)),
    Knob("KV_SLOTS", (2, 0, 1)),
)


def variant(problem: Problem) -> Variant:
    return Variant(family="backward_hopper_single", op="backward", causal=problem.causal)


def default(problem: Problem, gpu: Gpu) -> Config:
    return Config.of("backward_hopper_single", backward_hopper_single_default(problem, gpu))


def refusal(problem: Problem, config: Config, gpu: Gpu) -> str | None:
    """Why the config is wrong for the problem, or cannot be fast; None for a candidate."""
    knobs = config.as_dict()
    wrong = backward_hopper_single_refusal(problem, knobs, gpu)
    if wrong or config == default(problem, gpu):
        return wrong
    return backward_hopper.hopeless_keys(problem, knobs) or _hopeless_slots(problem, knobs, gpu)


def _hopeless_slots(problem: Problem, knobs: dict, gpu: Gpu) -> str | None:
    """Why programs that take units one after the other cannot be faster, or None."""
    kv_slots = knobs["KV_SLOTS"]
    units = problem.batch * problem.num_kv_heads * -(-problem.seqlen_k // 128)
    if kv_slots and units <= gpu.num_sms:
        return "every program has one unit, none is left to load under it"
    if kv_slots == 1:
        two = {**knobs, "KV_SLOTS": 2}
        if backward_hopper_single_refusal(problem, two, gpu) is None:
            return "keys wait for those before them to leave, and a second slot fits"
    return None


FAMILY = Family(
    name="backward_hopper_single",
    op="backward",
    parts=PARTS,
    knobs=KNOBS,
    variant=variant,
    unsupported=backward_hopper_single_unsupported,
    misfit=backward_hopper_single_refusal,
    refusal=refusal,
    default=default,
    interpretable=False,
    repeats=False,
    slow_to_compile=True,
)
