"""Merging two results into one: the parts of its text; it has nothing to tune."""

from autoflash.problem import Variant

NAME = "merge"
PARTS = ("triton_header.py.jinja", "merge/kernel.py.jinja", "merge/plan.py.jinja")


def variants() -> dict[str, Variant]:
    """Its one text, by its name."""
    return {NAME: Variant(NAME, NAME)}
