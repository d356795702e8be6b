"""The backward in a single pass: the kernel of dk and dv adds up dq too, by fp32 atomic adds."""

from autoflash.config import Config
from autoflash.families import backward
from autoflash.families.family import Family
from autoflash.gpu import Gpu
from autoflash.problem import SWITCHES, Problem, Variant
from autoflash.runtime.backward_validity import (
    backward_single_default,
    backward_single_refusal,
    backward_single_unsupported,
)

PARTS = (
    "triton_header.py.jinja",
    "backward/tiles.py.jinja",
    "shared/softcap.py.jinja",
    "shared/dropout.py.jinja",
    "prefill/modifiers.py.jinja",
    "shared/masks.py.jinja",
    "prefill/packed.py.jinja",
    "backward/scores.py.jinja",
    "backward/statistics.py.jinja",
    "backward/add_queries.py.jinja",
    "backward/keys.py.jinja",
    "backward/convert.py.jinja",
    "backward/bias.py.jinja",
    "backward/bias_scores.py.jinja",
    "backward/sinks.py.jinja",
    "backward/documents.py.jinja",
    "backward/sources.py.jinja",
    "backward/plan.py.jinja",
)
KNOBS = tuple(knob for knob in backward.KNOBS if not knob.name.startswith("Q_"))


def variant(problem: Problem) -> Variant:
    on = {name: True for name in problem.switches if name in SWITCHES}
    return Variant("backward_single", "backward", mask=problem.mask, **on)


def default(problem: Problem, gpu: Gpu) -> Config:
    return Config.of("backward_single", backward_single_default(problem, gpu))


def refusal(problem: Problem, config: Config, gpu: Gpu) -> str | None:
    """Why the config is wrong for the problem, or cannot be fast; None for a candidate."""
    knobs = config.as_dict()
    wrong = backward_single_refusal(problem, knobs, gpu)
    if wrong or config == default(problem, gpu):
        return wrong
    return backward.hopeless_load(problem, knobs, gpu) or backward.hopeless(
        problem, knobs, gpu, backward.keys_part(problem), backward_single_refusal
    )


FAMILY = Family(
    name="backward_single",
    op="backward",
    parts=PARTS,
    knobs=KNOBS,
    variant=variant,
    unsupported=backward_single_unsupported,
    misfit=backward_single_refusal,
    refusal=refusal,
    default=default,
    max_spills=backward.FAMILY.max_spills,
    repeats=False,
)
