"""`autoflash query`: winners, trials, failures and changes, or the answer to a question in SQL."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from autoflash.cli.filters import AsCsv, Database, Filters, filtered
from autoflash.cli.notices import counted, notice, store_warnings_told
from autoflash.cli.options import AsJson
from autoflash.cli.table import (
    Drawn,
    on_terminal,
    print_rows_as_csv,
    print_rows_as_json,
    print_table,
    write_rows_as_parquet,
)

if TYPE_CHECKING:
    from autoflash.store.reading import Row

    Found = tuple[Sequence[str], list[Row]]  # all columns there are, and the rows

SHAPE = ("gpu", "op", "dtype", "num_heads", "num_kv_heads", "head_dim", "batch", "seqlen_q")
WINNER_TABLE = (
    *SHAPE,
    *("seqlen_k", "causal", "page_size", "family", "knobs_json", "winner_us", "margin", "source"),
    *("origin", "foreign", "triton", "problem"),
)
TRIAL_TABLE = (
    *("id", *SHAPE),
    *("seqlen_k", "causal", "page_size", "family", "knobs_json", "status", "stage", "median_us"),
    *("registers", "spill_bytes", "smem_bytes", "source", "foreign", "triton", "problem", "error"),
)
SHIPPED_ONLY = "you have no database yet: shipped winners only"
FAILURE_TABLE = ("gpu", "family", "status", "reason", "candidates", "problems", "example")
DIFF_TABLE = (
    *SHAPE[1:],
    *("seqlen_k", "causal", "page_size", "first", "second", "first_us", "second_us", "ratio"),
    *("same_config", "first_knobs_json", "second_knobs_json", "problem"),
)
# What a terminal has of them, what is as wide as it likes last.
OF_ALL = ("gpu", "triton", "source", "origin", "foreign")
DRAWN = {
    WINNER_TABLE: Drawn(
        {name: name for name in (*OF_ALL, "problem", "family")}
        | {"us": "winner_us", "gain %": "gain_percent", "knobs": "knobs_json"},
        above=(*OF_ALL, "family"),
        spare=("knobs",),
    ),
    TRIAL_TABLE: Drawn(
        {name: name for name in ("gpu", "triton", "source", "foreign", "id", "problem", "family")}
        | {"status": "status", "stage": "stage", "us": "median_us"}
        | {"knobs": "knobs_json", "error": "error"},
        above=(*OF_ALL, "family", "status", "stage", "error"),
        spare=("knobs",),
    ),
    FAILURE_TABLE: Drawn(
        {name: name for name in FAILURE_TABLE}, above=("gpu", "family"), spare=("example",)
    ),
    DIFF_TABLE: Drawn(
        {"first": "first", "second": "second", "problem": "problem"}
        | {"first us": "first_us", "second us": "second_us", "ratio": "ratio"}
        | {"same config": "same_config"}
        | {"first knobs": "first_knobs_json", "second knobs": "second_knobs_json"},
        above=("first", "second"),
        spare=("first knobs", "second knobs"),
    ),
}


@filtered
def query(
    filters: Filters,
    trials: Annotated[
        bool, typer.Option("--trials", help="Every trial, failed ones too, not the winners.")
    ] = False,
    status: Annotated[
        Literal["correct", "constraints", "compile", "runtime", "correctness", "timeout"] | None,
        typer.Option(help="With --trials: what came of them."),
    ] = None,
    failures: Annotated[
        bool, typer.Option("--failures", help="Failed candidates, grouped by reason.")
    ] = False,
    diff: Annotated[
        Literal["gpu", "triton", "run"] | None,
        typer.Option(help="What the same problems take on two of them, the largest change first."),
    ] = None,
    between: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="With --diff: which two; needless where there are two."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Print at most so many rows.")] = None,
    sql: Annotated[
        str | None,
        typer.Option(metavar="SELECT", help="One SELECT; `autoflash db schema` has the columns."),
    ] = None,
    db: Database = None,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    parquet: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write Parquet; needs pyarrow.")
    ] = None,
) -> None:
    """Print winners, yours laid over the shipped ones; or trials, failures, changes."""
    if status is not None:
        filters = filters.also(status=status)
    asked = [trials, failures, diff is not None, sql is not None]
    if sql is not None and (filters or any(asked[:3])):
        raise typer.BadParameter("--sql takes no filters: it has its own WHERE")
    if sum(asked) > 1:
        raise typer.BadParameter("--trials, --failures and --diff exclude each other")
    if status is not None and not trials:
        raise typer.BadParameter("--status needs --trials: a winner is always correct")
    if between is not None and diff is None:
        raise typer.BadParameter("--between needs --diff")
    if diff == "gpu" and filters.gpu is not None:
        raise typer.BadParameter("--diff gpu takes its GPUs from --between")
    if diff is not None and "family" in filters.columns:
        raise typer.BadParameter("--diff compares winners of whichever family")
    if sum([as_json, as_csv, parquet is not None]) > 1:
        raise typer.BadParameter("--json, --csv or --parquet, not two of them")
    with store_warnings_told():
        if sql is not None:
            names, rows = _ask(db, sql)
            table = tuple(names)
        else:
            if diff is not None:
                table, (names, found) = DIFF_TABLE, _changes(db, diff, between, filters)
            elif failures:
                table, (names, found) = FAILURE_TABLE, _failures(db, filters)
            elif trials:
                table, (names, found) = TRIAL_TABLE, _trials(db, filters)
            else:
                table, (names, found) = WINNER_TABLE, _winners(db, filters)
            for_people = not (as_json or as_csv or parquet)
            if for_people:
                names = tuple(DRAWN[table].headings.values()) if on_terminal() else table
                found = [_for_people(row) for row in found]
            rows = [tuple(row[name] for name in names) for row in found]
    shown = rows[:limit]
    if len(shown) < len(rows):
        notice(f"{len(shown)} of {len(rows)} rows")
    if as_json:
        print_rows_as_json(names, shown)
    elif as_csv:
        print_rows_as_csv(names, shown)
    elif parquet:
        write_rows_as_parquet(names, shown, parquet)
        notice(f"{parquet}: {counted(len(shown), 'row')}")
    elif shown:
        print_table(names, shown, DRAWN.get(table))
    else:
        notice("no rows")


def _ask(db: Path | None, sql: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    from autoflash.store import Store, shipped_store, users_database
    from autoflash.store.asking import ask

    if db is None and users_database() is None:
        notice(SHIPPED_ONLY)
        with shipped_store() as store:
            return ask(store.conn, sql)
    with Store.open(db, readonly=True) as store:
        return ask(store.conn, sql)


def _trials(db: Path | None, filters: Filters) -> "Found":
    from autoflash.errors import StoreError
    from autoflash.store import Store, users_database
    from autoflash.store.foreign import here
    from autoflash.store.rows import TRIAL_COLUMNS, trial_rows

    if db is None and users_database() is None:
        raise StoreError(
            "you have no database yet, and shipped winners come without trials: "
            "`autoflash tune` makes some"
        )
    with Store.open(db, readonly=True) as store:
        rows = trial_rows(store, here(filters.gpu))
        return TRIAL_COLUMNS, [row for row in rows if filters.match(row)]


def _failures(db: Path | None, filters: Filters) -> "Found":
    from autoflash.explain import grouped_failures

    return FAILURE_TABLE, grouped_failures(_trials(db, filters)[1])


def _changes(db: Path | None, by: str, between: str | None, filters: Filters) -> "Found":
    from autoflash.compare import DIFF_COLUMNS, diff
    from autoflash.store import Store, users_database
    from autoflash.store.rows import decision_rows

    if db is None and users_database() is None:
        found = diff(filter(filters.match, decision_rows(None)), by, between)
    else:
        with Store.open(db, readonly=True) as store:
            found = diff(filter(filters.match, decision_rows(store)), by, between)
    for side, alone in ((found.first, found.only_first), (found.second, found.only_second)):
        if alone:
            notice(f"{counted(alone, 'problem is', 'problems are')} of {by} {side} alone")
    return DIFF_COLUMNS, list(found.rows)


def _winners(db: Path | None, filters: Filters) -> "Found":
    from autoflash.store import Store, users_database
    from autoflash.store.foreign import here
    from autoflash.store.rows import WINNER_COLUMNS, winner_rows

    if db is None and users_database() is None:
        notice(SHIPPED_ONLY)
        rows = winner_rows(None, here(filters.gpu))
        return WINNER_COLUMNS, [row for row in rows if filters.match(row)]
    with Store.open(db, readonly=True) as store:
        rows = winner_rows(store, here(filters.gpu))
        return WINNER_COLUMNS, [row for row in rows if filters.match(row)]


def _for_people(row: "Row") -> "Row":
    """The row with its problem; what was only predicted must not look like a time."""
    told = dict(row)
    if row.get("source") == "predicted":
        told |= dict.fromkeys(("winner_us", "margin"))
    if (margin := told.get("margin")) is not None:
        told["gain_percent"] = round(100 * margin, 1)
    if "op" in row:
        told["problem"] = _problem(row)
    return {"gain_percent": None} | told


def _problem(row: "Row") -> Any:
    """The problem of a row, or why its fields make none."""
    from autoflash.problem import Problem, ProblemError
    from autoflash.runtime.problem import PROBLEM_FIELDS

    try:
        return Problem(**{name: row[name] for name in PROBLEM_FIELDS})
    except ProblemError as error:
        return str(error)
