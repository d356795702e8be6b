"""Rendering: a Variant becomes one Python text of kernels and the plan() that launches them."""

import hashlib
import io
import re
import tokenize
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jinja2

from autoflash.families import parts_of
from autoflash.problem import Variant

AFTER_BLOCK = re.compile(r"(\n[ \t]+[^\n]*)\n(?=[@#A-Za-z])")  # a top-level line glued to a body


@dataclass(frozen=True)
class Rendered:
    """A variant's text. `digest` is that of the text without comments; it names the kernel."""

    variant: Variant
    text: str
    digest: str

    @property
    def name(self) -> str:
        return f"{self.variant.name}_{self.digest}"

    def part_at(self, line: int) -> str:
        """The template part that line number `line` (from 1) of the text was rendered from."""
        found = ""
        for first, part in _part_starts(self.variant):
            if first <= line:
                found = part
        return found


def templates_dir() -> Path:
    """The templates beside a checkout's pyproject.toml, else those shipped in the package."""
    package = Path(__file__).resolve().parent
    if (package.parent / "pyproject.toml").is_file():
        return package.parent / "templates"
    return package / "_templates"


@cache
def render(variant: Variant) -> Rendered:
    """The one text of this variant; it serves every config and shape of it."""
    text = "\n\n".join(text for _, text in _rendered_parts(variant))
    return Rendered(variant, text, digest(text))


def digest(text: str) -> str:
    """Twelve hex digits of the text's code: comments and blank lines do not count.

    Nor does the version of Python, whose tokens have other numbers in each.
    """
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    code = "\n".join(line.rstrip() for line in lines if line.strip())
    return hashlib.sha256(code.encode()).hexdigest()[:12]


@cache
def _rendered_parts(variant: Variant) -> tuple[tuple[str, str], ...]:
    environment = _environment()
    parts = []
    for part in parts_of(variant.family):
        body = environment.get_template(part).render(variant=variant).strip("\n") + "\n"
        if not body.strip():
            continue  # the variant needs nothing of this part
        # a line statement takes the blank lines after it along
        parts.append((part, AFTER_BLOCK.sub(r"\1\n\n\n", body)))
    return tuple(parts)


def _part_starts(variant: Variant) -> list[tuple[int, str]]:
    starts, line = [], 1
    for part, body in _rendered_parts(variant):
        starts.append((line, part))
        line += body.count("\n") + 2  # two blank lines stand between parts
    return starts


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates_dir()),
        line_statement_prefix="# %",
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
    )
