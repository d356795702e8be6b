"""The kernel families: what each serves, its knobs, its predicate, its default config."""

from autoflash.config import Config
from autoflash.errors import UnsupportedError
from autoflash.families import (
    append_kv,
    backward,
    backward_hopper,
    backward_hopper_single,
    backward_single,
    decode,
    decode_last,
    decode_latent,
    merge,
    prefill,
    prefill_hopper,
)
from autoflash.families.family import Family, sample, samples, space, variants
from autoflash.gpu import Gpu
from autoflash.problem import Problem, Variant

__all__ = [
    "FAMILIES",
    "Family",
    "every_variant",
    "family_of",
    "parts_of",
    "sample",
    "samples",
    "serving",
    "space",
    "untuned_variants",
    "variants",
    "why_refused",
]

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        prefill.FAMILY,
        prefill_hopper.FAMILY,
        decode.FAMILY,
        decode_last.FAMILY,
        decode_latent.FAMILY,
        backward.FAMILY,
        backward_single.FAMILY,
        backward_hopper.FAMILY,
        backward_hopper_single.FAMILY,
    )
}
UNTUNED = (append_kv, merge)


def family_of(name: str) -> Family:
    """The family of this name. Raises UnsupportedError for a name that is none."""
    if name not in FAMILIES:
        raise UnsupportedError(f"no family is called {name!r}; known are {', '.join(FAMILIES)}")
    return FAMILIES[name]


def parts_of(name: str) -> tuple[str, ...]:
    """The parts of the texts of this name, a family's or what is not tuned."""
    untuned = {each.NAME: each.PARTS for each in UNTUNED}
    return untuned.get(name) or family_of(name).parts


def every_variant() -> dict[str, Variant]:
    """Every text there is, by its name."""
    tuned = {k: v for family in FAMILIES.values() for k, v in variants(family).items()}
    return tuned | untuned_variants()


def untuned_variants() -> dict[str, Variant]:
    """The texts that have nothing to tune, by their names."""
    return {name: variant for each in UNTUNED for name, variant in each.variants().items()}


def why_refused(problem: Problem, config: Config, gpu: Gpu) -> str | None:
    """Why a config from anywhere cannot serve the problem, or None; slow ones can.

    Asks the family, once family and knobs are known ones.
    """
    family = FAMILIES.get(config.family)
    if family is None:
        return f"no family is called {config.family!r}"
    names, given = {knob.name for knob in family.knobs}, set(config.as_dict())
    if names != given:
        return f"its knobs are not the family's: {', '.join(sorted(names ^ given))}"
    for knob in family.knobs:
        if type(config[knob.name]) is not type(knob.values[0]):
            return f"{knob.name} is {config[knob.name]!r}"
    return family.unsupported(problem, gpu) or family.misfit(problem, config.as_dict(), gpu)


def serving(problem: Problem, gpu: Gpu) -> list[Family]:
    """The families that serve the problem on this GPU, the portable one first.

    Raises UnsupportedError with each family's reason when none does.
    """
    reasons = {
        family.name: family.unsupported(problem, gpu)
        for family in FAMILIES.values()
        if family.op == problem.op
    }
    served = [FAMILIES[name] for name, reason in reasons.items() if reason is None]
    if not served:
        listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise UnsupportedError(f"no family serves this {problem.op} on {gpu.name}: {listed}")
    return served
