"""`autoflash render`: the text of one kernel, as it is tuned and exported."""

import difflib
import sys
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoflash.cli.options import Causal, Op

if TYPE_CHECKING:
    from autoflash.problem import Variant


def render(
    op: Op = None,
    causal: Causal = False,
    paged: Annotated[bool, typer.Option(help="A cache of pages behind a block table.")] = False,
    family: Annotated[
        str | None, typer.Option(metavar="NAME", help="The kernel family, else the portable one.")
    ] = None,
    variant: Annotated[
        str | None, typer.Option(metavar="NAME", help="A variant by its name, and nothing else.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write it to a file.")
    ] = None,
) -> None:
    """Print a kernel's text, found by switches or by name."""
    if (op is None) == (variant is None):
        raise typer.BadParameter("give either --op with its switches or --variant")
    from autoflash.errors import AutoflashError
    from autoflash.render import render as rendered

    text = rendered(_switched(op, causal, paged, family) if op else _named(variant or "")).text
    if output is None:
        sys.stdout.write(text)
        return
    try:
        output.write_text(text)
    except OSError as error:
        raise AutoflashError(f"cannot write {output}: {error.strerror}") from None


def _switched(op: str, causal: bool, paged: bool, family: str | None) -> "Variant":
    """The variant of the family, or of the first family of the op, with these switches."""
    from autoflash.errors import UnsupportedError
    from autoflash.families import FAMILIES, family_of
    from autoflash.gpu import DEFAULT_TARGET, known
    from autoflash.problem import Problem

    chosen = family_of(family or next(each.name for each in FAMILIES.values() if each.op == op))
    if chosen.op != op:
        raise UnsupportedError(f"family {chosen.name} computes {chosen.op}, not {op}")
    problem = Problem(  # its shape plays no part in the variant
        op=op,
        dtype="bf16",
        batch=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=64,
        seqlen_q=1,
        seqlen_k=64,
        causal=causal,
        page_size=16 if paged else 0,
    )
    if (reason := chosen.unsupported(problem, known(DEFAULT_TARGET))) is not None:
        raise UnsupportedError(f"family {chosen.name}: {reason}")
    return chosen.variant(problem)


def _named(name: str) -> "Variant":
    """The variant of this name. Raises UnsupportedError naming the nearest one, or all."""
    from autoflash.errors import UnsupportedError
    from autoflash.families import FAMILIES

    variants = {}
    for family, causal, paged in product(FAMILIES.values(), (False, True), (False, True)):
        with suppress(UnsupportedError):  # not every family knows every switch
            variant = _switched(family.op, causal, paged, family.name)
            variants[variant.name] = variant
    if name not in variants:
        near = difflib.get_close_matches(name, variants, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(variants))}"
        raise UnsupportedError(f"no variant is called {name}; {hint}")
    return variants[name]
