"""Appending to a cache: the parts of its text; it has nothing to tune."""

from autoflash.problem import Variant

NAME = "append_kv"
PARTS = ("triton_header.py.jinja", "append_kv/kernel.py.jinja", "append_kv/plan.py.jinja")


def variants() -> dict[str, Variant]:
    """Every text by its name: for caches as the tokens are, and quantised ones."""
    switches = ((), ("quantised",), ("quantised", "token_scales"))
    every = [Variant(NAME, NAME, **dict.fromkeys(on, True)) for on in switches]
    return {variant.name: variant for variant in every}
