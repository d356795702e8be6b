"""Drawing: rows in a terminal, a line for each row as long as the terminal has room for that."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autoflash.cli.notices import notice
from autoflash.cli.table import Drawn, cell_of
from autoflash.problem import Problem, briefs

GAP = 2  # between two columns
LONG = 24  # wider texts, such as knobs and errors, are cut where there is no room
LEAST = 10  # what is left of them; less says nothing
# A longer problem goes on below: rather than have long texts cut, and rather than lose them.
PROBLEM = 48
LEAST_PROBLEM = 40
LETTERS = "b batch, h heads, d head_dim, q queries, k keys, p page_size, w window"


@dataclass
class Column:
    """A column of cells, each a line. `width` is what it is given."""

    name: str
    cells: list[str]
    numeric: bool
    width: int = 0

    @property
    def is_problem(self) -> bool:
        return self.name == "problem"

    @property
    def may_be_cut(self) -> bool:
        return not self.numeric and not self.is_problem and self.widest > LONG

    @property
    def widest(self) -> int:
        return max(map(len, self.cells), default=0)

    @property
    def whole(self) -> int:
        """The width with the name in a line."""
        return max(len(self.name), self.widest)

    @property
    def close(self) -> int:
        """The width with the name in several."""
        return max(self.widest, *map(len, self.broken_name.split("\n")))

    @property
    def broken_name(self) -> str:
        return self.name.replace("_", "_\n").replace(" ", "\n")

    @property
    def heading(self) -> str:
        return self.name if len(self.name) <= self.width else self.broken_name


def draw(names: Sequence[str], rows: Sequence[Sequence[Any]], drawn: Drawn | None) -> None:
    """Print the rows as wide as the terminal: a line for each, else a block for each.

    What all rows have alike is said once above. Long texts end in an ellipsis.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    columns, said = _columns(names, rows, drawn)
    if said:
        console.print(Text(f"all rows: {', '.join(said)}"))
    if any(isinstance(value, Problem) for row in rows for value in row):
        console.print(Text(f"problem: {LETTERS}"))
    fitted = fit(columns, console.width, drawn.spare if drawn else ())
    if fitted is None:
        _print_blocks(columns, console)
        return
    gone = [column.name for column in columns if column not in fitted]
    if gone:
        notice(f"{', '.join(gone)}: no room in {console.width} columns")
    console.print(_table(fitted))


def fit(columns: list[Column], room: int, spare: Sequence[str] = ()) -> list[Column] | None:
    """The columns with their widths; those of `spare`, the last first, only where there is room.

    None where the others have none.
    """
    kept = list(columns)
    for column in kept:
        column.width = column.whole
    if _over(kept, room) <= 0:
        return kept
    for column in kept:
        column.width = column.close
    problems = [column for column in kept if column.is_problem]
    long = [column for column in kept if column.may_be_cut]
    _narrow(problems, PROBLEM, _over(kept, room))
    _narrow(long, LEAST, _over(kept, room))
    _narrow(problems, LEAST_PROBLEM, _over(kept, room))
    may_go = [column for column in kept if column.name in spare]
    while _over(kept, room) > 0 and may_go:
        kept.remove(may_go.pop())
    for column in [*problems, *(column for column in long if column in kept)]:
        column.width = max(column.width, min(column.close, column.width - _over(kept, room)))
    return kept if _over(kept, room) <= 0 else None


def _over(columns: Sequence[Column], room: int) -> int:
    """By how much the columns are wider than the room."""
    return sum(column.width + GAP for column in columns) - GAP - room


def _narrow(columns: Sequence[Column], least: int, over: int) -> None:
    """Take from the widest of the columns until nothing is over, or each is at its least."""
    for _ in range(over):
        widest = max(columns, key=lambda column: column.width, default=None)
        if widest is None or widest.width <= max(least, len(widest.name)):
            return
        widest.width -= 1


def _columns(
    names: Sequence[str], rows: Sequence[Sequence[Any]], drawn: Drawn | None
) -> tuple[list[Column], list[str]]:
    """The columns that are drawn, and what is said above them."""
    columns, said = [], []
    headings = drawn.headings if drawn else {name: name for name in names}
    for name, column in headings.items():
        values = [row[names.index(column)] for row in rows]
        if all(isinstance(value, Problem) for value in values):
            alike, cells = briefs(values)
            said += [f"problem {alike}"] * bool(alike)
            if any(cells):
                columns.append(Column(name, [cell or "as above" for cell in cells], False))
            continue
        if drawn and name in drawn.above and len(set(values)) == 1:
            said += [f"{name} {cell_of(values[0])}"] * (values[0] not in (None, ""))
            continue
        numeric = all(isinstance(value, int | float | None) for value in values)
        cells = [(_knobs if "knobs" in name else cell_of)(value) for value in values]
        if name == "knobs":
            alike, cells = _apart(cells)
            said += [f"knobs {alike}"] * bool(alike)
        columns.append(Column(name, cells, numeric))
    return columns, said


def _apart(cells: list[str]) -> tuple[str, list[str]]:
    """The words that all of several cells have, and each without them."""
    words = [cell.split() for cell in cells]
    alike = [word for word in words[0] if all(word in each for each in words)] if words[1:] else []
    return " ".join(alike), [" ".join(x for x in each if x not in alike) for each in words]


def _knobs(value: Any) -> str:
    """Knobs as the other commands write them; what is not knobs as it is."""
    try:
        return cell_of(" ".join(f"{name}={each}" for name, each in json.loads(value).items()))
    except (TypeError, ValueError, AttributeError):
        return cell_of(value)


def _table(columns: Sequence[Column]) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    # Text: a cell is never read as markup
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(
            Text(column.heading),
            justify="right" if column.numeric else "left",
            width=column.width,
            no_wrap=not column.is_problem,
            overflow="fold" if column.is_problem else "ellipsis",
        )
    for cells in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*map(Text, cells))
    return table


def _print_blocks(columns: Sequence[Column], console: Any) -> None:
    from rich.table import Table
    from rich.text import Text

    for place, cells in enumerate(zip(*(column.cells for column in columns), strict=True)):
        block = Table.grid(padding=(0, GAP, 0, 0))
        for column, cell in zip(columns, cells, strict=True):
            block.add_row(Text(column.name, no_wrap=True), Text(cell))
        if place:
            console.print()
        console.print(block)
