"""`autoflash query`: winners, trials, failures and changes, or the answer to a question in SQL."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from autoflash.cli.filters import (
    AsCsv,
    Count,
    Database,
    Filters,
    Length,
    OfDtype,
    OfFamily,
    OfGpu,
    OfOp,
    Paged,
)
from autoflash.cli.notices import notice, store_warnings_told
from autoflash.cli.options import AsJson
from autoflash.cli.table import (
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
    *("origin", "foreign"),
)
TRIAL_TABLE = (
    *("id", *SHAPE),
    *("seqlen_k", "causal", "page_size", "family", "knobs_json", "status", "stage", "median_us"),
    *("registers", "spill_bytes", "smem_bytes", "source", "foreign", "error"),
)
FAILURE_TABLE = ("gpu", "family", "status", "reason", "candidates", "problems", "example")
DIFF_TABLE = (
    *SHAPE[1:],
    *("seqlen_k", "causal", "page_size", "first", "second", "first_us", "second_us", "ratio"),
    *("same_config", "first_knobs_json", "second_knobs_json"),
)


def query(
    gpu: OfGpu = None,
    op: OfOp = None,
    dtype: OfDtype = None,
    head_dim: Count = None,
    num_heads: Count = None,
    num_kv_heads: Count = None,
    batch: Count = None,
    seqlen_q: Count = None,
    seqlen_k: Length = None,
    paged: Paged = None,
    family: OfFamily = None,
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
    filters = Filters.of(
        gpu,
        paged,
        op=op,
        dtype=dtype,
        head_dim=head_dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        family=family,
        status=status,
    )
    asked = [trials, failures, diff is not None, sql is not None]
    if sql is not None and (filters or any(asked[:3])):
        raise typer.BadParameter("--sql takes no filters: it has its own WHERE")
    if sum(asked) > 1:
        raise typer.BadParameter("--trials, --failures and --diff exclude each other")
    if status is not None and not trials:
        raise typer.BadParameter("--status needs --trials: a winner is always correct")
    if between is not None and diff is None:
        raise typer.BadParameter("--between needs --diff")
    if diff == "gpu" and gpu is not None:
        raise typer.BadParameter("--diff gpu takes its GPUs from --between")
    if diff is not None and family is not None:
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
                names, found = table, [_without_predicted_times(row) for row in found]
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
        notice(f"{parquet}: {len(shown)} rows")
    elif shown:
        print_table(names, shown)
    else:
        notice("no rows")


def _ask(db: Path | None, sql: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    from autoflash.store import Store
    from autoflash.store.asking import ask

    with Store.open(db, readonly=True) as store:
        return ask(store.conn, sql)


def _trials(db: Path | None, filters: Filters) -> "Found":
    from autoflash.store import Store
    from autoflash.store.foreign import here
    from autoflash.store.rows import TRIAL_COLUMNS, trial_rows

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
            notice(f"{alone} problems are of {by} {side} alone")
    return DIFF_COLUMNS, list(found.rows)


def _winners(db: Path | None, filters: Filters) -> "Found":
    from autoflash.store import Store, users_database
    from autoflash.store.foreign import here
    from autoflash.store.rows import WINNER_COLUMNS, winner_rows

    if db is None and users_database() is None:
        notice("you have no database yet: shipped winners only")
        rows = winner_rows(None, here(filters.gpu))
        return WINNER_COLUMNS, [row for row in rows if filters.match(row)]
    with Store.open(db, readonly=True) as store:
        rows = winner_rows(store, here(filters.gpu))
        return WINNER_COLUMNS, [row for row in rows if filters.match(row)]


def _without_predicted_times(row: "Row") -> "Row":
    """In a table for people, what was only predicted must not look like a time."""
    times = ("winner_us", "margin") if row.get("source") == "predicted" else ()
    return row | dict.fromkeys(times)
