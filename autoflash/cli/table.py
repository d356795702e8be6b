"""Rows on stdout: a table for people, JSON, CSV or Parquet for scripts."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WIDEST = 200  # of a cell in a table: all knobs of a family, the beginning of an error


def print_table(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Aligned columns; in a terminal drawn by rich."""
    cells = [[_cell(value) for value in row] for row in rows]
    if sys.stdout.isatty():
        _draw(names, cells)
        return
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
        {name: _value(name, value) for name, value in zip(names, row, strict=True)} for row in rows
    ]
    print(json.dumps(objects, indent=2))


def print_rows_as_csv(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A line of names, then a line for each row."""
    import csv

    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(rows)


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


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.5g}"
    text = " ".join(str(value).split())  # an error may have lines and tabs
    return text if len(text) <= WIDEST else text[: WIDEST - 3] + "..."


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


def _draw(names: Sequence[str], cells: list[list[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    for name in names:
        table.add_column(name, overflow="fold")
    for row in cells:
        table.add_row(*(Text(cell) for cell in row))  # Text: a cell is never read as markup
    Console().print(table)
