"""Heat map: one quantity over batch and length, as a table whose cells are shaded."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autoflash.problem import Problem, title

Value = tuple[Problem, float, str, str]  # where, how much, as it is written, what it tells


@dataclass(frozen=True)
class Cell:
    """`heat` is 0 to 1, in whole percent; an empty `text` is a shape that was not measured."""

    text: str = ""
    heat: int = 0
    told: str = ""


@dataclass(frozen=True)
class HeatMap:
    """`lengths` head the columns, each row begins with its batch."""

    caption: str
    lengths: tuple[str, ...]
    rows: tuple[tuple[int, tuple[Cell, ...]], ...]


def kind(problem: Problem) -> str:
    """The problem in words, without its batch and its lengths."""
    parts = title(problem).split(", ")
    shape = ("queries", "keys") if problem.op != "decode" else ("keys",)
    return ", ".join(p for p in parts if not (p.startswith("batch ") or p.endswith(shape)))


def by_kind(values: Iterable[Value]) -> dict[str, list[Value]]:
    """The values of each kind of problem, in their order."""
    found: dict[str, list[Value]] = defaultdict(list)
    for value in values:
        found[kind(value[0])].append(value)
    return dict(found)


def heat_map(caption: str, values: Sequence[Value], low: float, high: float) -> HeatMap:
    """The map of values of one kind, shaded from `low` to `high`."""
    cells = {}
    for problem, value, text, told in values:
        share = (value - low) / (high - low) if high > low else 1.0
        heat = round(100 * min(max(share, 0.0), 1.0))
        cells[problem.batch, _length(problem)] = Cell(text, heat, told)
    batches = sorted({batch for batch, _ in cells})
    lengths = sorted({length for _, length in cells})
    rows = tuple(
        (batch, tuple(cells.get((batch, length), Cell()) for length in lengths))
        for batch in batches
    )
    return HeatMap(caption, tuple(text for _, _, text in lengths), rows)


def _length(problem: Problem) -> tuple[int, int, str]:
    """The column of a problem: its keys, and in prefill its queries where they are not as many."""
    queries, keys = problem.seqlen_q, problem.seqlen_k
    if problem.op == "decode" or queries == keys:
        return keys, 0, str(keys)
    return keys, queries, f"{queries} of {keys}"
