"""Compare: the same problems on two GPUs, with two versions of triton, or in two runs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from autoflash.errors import StoreError
from autoflash.runtime.problem import PROBLEM_FIELDS
from autoflash.store.foreign import names
from autoflash.store.reading import Row

COLUMNS = {"gpu": "gpu", "triton": "triton", "run": "run_id"}
DIFF_COLUMNS = (
    *PROBLEM_FIELDS,
    *("first", "second", "first_us", "second_us", "ratio", "same_config"),
    *("first_family", "first_knobs_json", "second_family", "second_knobs_json"),
)


@dataclass(frozen=True)
class Diff:
    """`rows` hold what both sides decided, the largest change first; `ratio` is second over first.

    `only_first` and `only_second` are how many problems one side alone has.
    """

    first: Any
    second: Any
    rows: tuple[Row, ...]
    only_first: int
    only_second: int


def diff(rows: Iterable[Mapping[str, Any]], by: str, between: str | None) -> Diff:
    """What changed from one side to the other, of the latest measured decisions.

    `rows` come oldest first. `by` is `gpu`, `triton` or `run`; `between` is `A,B`, and may be left
    out where there are exactly two. Raises StoreError for sides that are not there.
    """
    column = COLUMNS[by]
    measured = [row for row in rows if row["source"] == "measured"]
    first, second = _sides(by, _distinct(measured, column), between)
    sides: dict[Any, dict[Any, Mapping[str, Any]]] = {first: {}, second: {}}
    for row in measured:
        if row[column] in sides:
            sides[row[column]][_key(row, by)] = row
    one, other = sides[first], sides[second]
    common = [_compared(one[key], other[key], first, second) for key in one if key in other]
    common.sort(key=lambda row: -abs(row["ratio"] - 1))
    return Diff(first, second, tuple(common), len(one) - len(common), len(other) - len(common))


def _distinct(rows: Iterable[Mapping[str, Any]], column: str) -> list[Any]:
    return sorted({row[column] for row in rows if row[column] is not None})


def _key(row: Mapping[str, Any], by: str) -> tuple[Any, ...]:
    """What must be equal: the problem and, unless it is what differs, the GPU type."""
    identity = () if by == "gpu" else ("gpu", "arch", "num_sms", "memory_gib", "mig_profile")
    return tuple(row[name] for name in (*identity, *PROBLEM_FIELDS))


def _compared(one: Mapping[str, Any], other: Mapping[str, Any], first: Any, second: Any) -> Row:
    same = (one["family"], one["knobs_json"]) == (other["family"], other["knobs_json"])
    return {
        **{name: one[name] for name in PROBLEM_FIELDS},
        "first": first,
        "second": second,
        "first_us": one["winner_us"],
        "second_us": other["winner_us"],
        "ratio": other["winner_us"] / one["winner_us"],
        "same_config": int(same),
        "first_family": one["family"],
        "first_knobs_json": one["knobs_json"],
        "second_family": other["family"],
        "second_knobs_json": other["knobs_json"],
    }


def _sides(by: str, there: list[Any], between: str | None) -> tuple[Any, Any]:
    known = ", ".join(map(str, there)) or "none"
    if between is None:
        if len(there) != 2:
            raise StoreError(f"--diff {by}: say which two with --between A,B; there are: {known}")
        return there[0], there[1]
    asked = [each.strip() for each in between.split(",")]
    if len(asked) != 2:
        raise StoreError(f"--between {between}: two are compared, given as A,B")
    first, second = (_named(by, each, there, known) for each in asked)
    if first == second:
        raise StoreError(f"--between {between}: both are {first}")
    return first, second


def _named(by: str, asked: str, there: list[Any], known: str) -> Any:
    if by == "gpu":
        found = [name for name in there if names(asked, name)]
    else:
        found = [each for each in there if str(each) == asked]
    if len(found) != 1:
        what = "more than one" if found else "no"
        raise StoreError(f"--between: {what} {by} is called {asked}; there are: {known}")
    return found[0]
