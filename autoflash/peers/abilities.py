"""Abilities: what a problem has beside the plain one, who lacks some, and how it is passed."""

from collections.abc import Collection
from typing import Any

import torch

from autoflash.inputs import Inputs
from autoflash.peers.contender import Unavailable
from autoflash.problem import Problem
from autoflash.runtime.problem import CHOSEN

# What a problem may have, as reasons call it.
NAMES = {
    "window": "windows",
    "right": "windows to the right",
    "softcap": "softcap",
    "alibi": "ALiBi of given slopes",
    "bias": "bias",
    "sinks": "sinks",
    "dropout": "dropout of a given seed",
    "blocks": "masks of blocks",
    "documents": "documents",
    "prefix": "prefixes",
    "mask": "custom masks",
    "packed": "packed sequences",
    "pages": "prefill over pages",
    CHOSEN: "chosen pages",
    "latent": "latent attention",
    "deterministic": "deterministic gradients",
}


def asked_of(problem: Problem) -> list[str]:
    """Which of NAMES a problem has."""
    p = problem
    on = {
        "window": p.window_left >= 0 or p.window_right >= 0,
        "right": p.window_right >= 0,
        "packed": p.varlen,
        "pages": p.paged and p.op != "decode",
        CHOSEN: p.pages == CHOSEN,
        "latent": p.latent,
        "deterministic": p.deterministic,
    }
    return [*(name for name, is_on in on.items() if is_on), *p.modifiers, *p.masks]


def refuse(problem: Problem, has: Collection[str] = (), unpassed: Collection[str] = ()) -> None:
    """Raises Unavailable where a problem has what a peer has not.

    `unpassed` is what a peer may have and its adapter does not use.
    """
    asked = [name for name in NAMES if name in asked_of(problem)]  # in one order
    if "right" in asked and "window" not in has:
        asked.remove("right")  # told with the other
    left = [NAMES[name] for name in asked if name in unpassed]
    lacking = [NAMES[name] for name in asked if name not in has and name not in unpassed]
    if lacking:
        raise Unavailable(f"it has no {' and no '.join(lacking)}")
    if left:
        raise Unavailable(f"its adapter passes no {' and no '.join(left)}")


def one_slope_a_head(one: Inputs) -> torch.Tensor:
    """The slopes of ALiBi as (num_heads,), of a peer that has none for each sequence."""
    assert one.alibi_slopes is not None
    if one.problem.batch > 1:
        raise Unavailable("it has a slope for each head, none for each sequence's")
    return one.alibi_slopes[0]


def flash_arguments(
    one: Inputs, unbounded: int | None = -1, **others: torch.Tensor | None
) -> dict[str, Any]:
    """Window and softcap as the calls of FlashAttention take them, and of `others` those given.

    A plain problem has none: old versions lack some arguments.
    """
    p = one.problem
    window = tuple(unbounded if side < 0 else side for side in p.window)
    given: dict[str, Any] = {"window_size": window} if p.windowed else {}
    given |= {"softcap": one.softcap} if p.softcap else {}
    return given | {name: each for name, each in others.items() if each is not None}


def rounded_sinks(one: Inputs) -> torch.Tensor | None:
    """The sinks in bf16, the only ones that FlashAttention-3 has."""
    return None if one.sinks is None else one.sinks.bfloat16()
