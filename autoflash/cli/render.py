"""`autoflash render`: the text of one kernel, as it is tuned and exported."""

import difflib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoflash.cli.options import Causal, Op

if TYPE_CHECKING:
    from autoflash.problem import Variant


def render(
    op: Op = None,
    causal: Causal = False,
    paged: Annotated[
        bool, typer.Option("--paged", help="A cache of pages behind a block table.")
    ] = False,
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
    from autoflash.families import FAMILIES, family_of, sample
    from autoflash.gpu import DEFAULT_TARGET, known

    chosen = family_of(family or next(each.name for each in FAMILIES.values() if each.op == op))
    problem = sample(op, causal=causal, paged=paged)
    reason = chosen.unsupported(problem, known(DEFAULT_TARGET))
    if reason:
        raise UnsupportedError(f"family {chosen.name}: {reason}")
    return chosen.variant(problem)


def _named(name: str) -> "Variant":
    """The variant of this name. Raises UnsupportedError naming the nearest one, or all."""
    from autoflash.errors import UnsupportedError
    from autoflash.families import every_variant

    every = every_variant()
    if name not in every:
        near = difflib.get_close_matches(name, every, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(every))}"
        raise UnsupportedError(f"no variant is called {name}; {hint}")
    return every[name]
