"""Rows on stdout: a table for people, JSON, CSV or Parquet for scripts."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WIDEST = 200  # of a cell in a table: all knobs of a family, the beginning of an error


@dataclass(frozen=True)
class Drawn:
    """What a terminal has of a table: which columns by which headings.

    Of these `above` are said once if all rows agree, and `spare` are left out where there is no
    room, the last first.
    """

    headings: Mapping[str, str]
    above: Sequence[str] = ()
    spare: Sequence[str] = ()


def on_terminal() -> bool:
    """Whether rows are read by a person: a table is as wide as the terminal, not as its columns."""
    return sys.stdout.isatty()


def print_table(
    names: Sequence[str], rows: Sequence[Sequence[Any]], drawn: Drawn | None = None
) -> None:
    """All columns, aligned; in a terminal as `drawn` says, and as wide as it is."""
    if on_terminal():
        from autoflash.cli.drawing import draw

        draw(names, rows, drawn)
        return
    cells = [[cell_of(value) for value in row] for row in rows]
    lines = [list(names), *cells]
    numeric = [
        all(isinstance(row[i], int | float | None) for row in rows) for i in range(len(names))
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for row in lines:
        padded = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        )
        print("  ".join(padded).rstrip())


def print_rows_as_json(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A list of objects; what a `_json` column holds becomes part of them."""
    import json

    objects = [
        {name: _value(name, value) for name, value in zip(names, row, strict=True)}
        for row in titled(rows)
    ]
    print(json.dumps(objects, indent=2))


def print_rows_as_csv(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A line of names, then a line for each row."""
    import csv

    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(titled(rows))


def write_rows_as_parquet(names: Sequence[str], rows: Sequence[Sequence[Any]], path: Path) -> None:
    """A Parquet file with a column for each name. Raises AutoflashError where that cannot be."""
    from importlib import import_module

    from autoflash.errors import AutoflashError

    try:
        pyarrow: Any = import_module("pyarrow")
        parquet: Any = import_module("pyarrow.parquet")
    except ImportError:
        raise AutoflashError("--parquet needs pyarrow: pip install 'autoflash[parquet]'") from None
    columns = {name: [row[place] for row in rows] for place, name in enumerate(names)}
    try:
        parquet.write_table(pyarrow.table(columns), path)
    except OSError as error:
        raise AutoflashError(f"{path}: cannot be written: {error.strerror or error}") from None
    except pyarrow.ArrowInvalid as error:  # sqlite lets a column hold numbers and text
        raise AutoflashError(f"{path}: no Parquet for these rows: {error}") from None


def titled(rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """The rows with a problem's title in place of the problem."""
    return [[_titled(value) for value in row] for row in rows]


def cell_of(value: Any) -> str:
    """What a table shows of a value, in one line."""
    value = _titled(value)
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.5g}"
    text = " ".join(str(value).split())  # an error may have lines and tabs
    return text if len(text) <= WIDEST else text[: WIDEST - 3] + "..."


def _titled(value: Any) -> Any:
    from autoflash.problem import Problem, title

    return title(value) if isinstance(value, Problem) else value


def _value(name: str, value: Any) -> Any:
    import json

    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return None  # JSON has no infinity
    if name.endswith("_json") and isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value
