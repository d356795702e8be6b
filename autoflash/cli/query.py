"""`autoflash query`: winners and trials, filtered, or the answer to a question in SQL."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from autoflash.cli.notices import notice, store_warnings_told
from autoflash.cli.options import AsJson
from autoflash.cli.table import print_rows_as_csv, print_rows_as_json, print_table

if TYPE_CHECKING:
    from autoflash.store.reading import Row

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

Database = Annotated[
    Path | None,
    typer.Option("--db", metavar="FILE", help="The database, else $AUTOFLASH_DB, else yours."),
]


def query(
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="A GPU by its name or words of it.")
    ] = None,
    op: Annotated[Literal["prefill", "decode"] | None, typer.Option()] = None,
    dtype: Annotated[Literal["bf16", "fp16", "fp32"] | None, typer.Option()] = None,
    head_dim: Annotated[int | None, typer.Option(min=1)] = None,
    num_heads: Annotated[int | None, typer.Option(min=1)] = None,
    num_kv_heads: Annotated[int | None, typer.Option(min=1)] = None,
    batch: Annotated[int | None, typer.Option(min=1)] = None,
    seqlen_q: Annotated[int | None, typer.Option(min=1)] = None,
    seqlen_k: Annotated[int | None, typer.Option(min=0)] = None,
    paged: Annotated[
        bool | None, typer.Option("--paged/--contiguous", help="Only the one kind of cache.")
    ] = None,
    family: Annotated[str | None, typer.Option(metavar="NAME", help="A kernel family.")] = None,
    trials: Annotated[
        bool, typer.Option("--trials", help="Every trial, failed ones too, not the winners.")
    ] = False,
    status: Annotated[
        Literal["correct", "constraints", "compile", "runtime", "correctness", "timeout"] | None,
        typer.Option(help="With --trials: what came of them."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Print at most so many rows.")] = None,
    sql: Annotated[
        str | None,
        typer.Option(metavar="SELECT", help="One SELECT; `autoflash db schema` has the columns."),
    ] = None,
    db: Database = None,
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
) -> None:
    """Print winners, yours laid over the shipped ones, or trials."""
    wanted = {
        "op": op,
        "dtype": dtype,
        "head_dim": head_dim,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "batch": batch,
        "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_k,
        "family": family,
        "status": status,
    }
    wanted = {column: value for column, value in wanted.items() if value is not None}
    if sql is not None and (wanted or trials or gpu is not None or paged is not None):
        raise typer.BadParameter("--sql takes no filters: it has its own WHERE")
    if status is not None and not trials:
        raise typer.BadParameter("--status needs --trials: a winner is always correct")
    if as_json and as_csv:
        raise typer.BadParameter("--json or --csv, not both")
    if sql is not None:
        names, rows = _ask(db, sql)
    else:
        with store_warnings_told():
            columns, found = _trials(db, gpu) if trials else _winners(db, gpu)
            found = [row for row in found if _matches(row, wanted, gpu, paged)]
        if as_json or as_csv:
            names = list(columns)
        else:
            names = list(TRIAL_TABLE if trials else WINNER_TABLE)
            found = [_without_predicted_times(row) for row in found]
        rows = [tuple(row[name] for name in names) for row in found]
    shown = rows[:limit]
    if len(shown) < len(rows):
        notice(f"{len(shown)} of {len(rows)} rows")
    if as_json:
        print_rows_as_json(names, shown)
    elif as_csv:
        print_rows_as_csv(names, shown)
    elif shown:
        print_table(names, shown)
    else:
        notice("no rows")


def _ask(db: Path | None, sql: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    from autoflash.store import Store
    from autoflash.store.asking import ask

    with store_warnings_told(), Store.open(db, readonly=True) as store:
        return ask(store.conn, sql)


def _trials(db: Path | None, gpu: str | None) -> "tuple[tuple[str, ...], list[Row]]":
    from autoflash.store import Store
    from autoflash.store.foreign import here
    from autoflash.store.rows import TRIAL_COLUMNS, trial_rows

    with Store.open(db, readonly=True) as store:
        return TRIAL_COLUMNS, list(trial_rows(store, here(gpu)))


def _winners(db: Path | None, gpu: str | None) -> "tuple[tuple[str, ...], list[Row]]":
    from autoflash.store import Store, users_database
    from autoflash.store.foreign import here
    from autoflash.store.rows import WINNER_COLUMNS, winner_rows

    if db is None and users_database() is None:
        notice("you have no database yet: shipped winners only")
        return WINNER_COLUMNS, list(winner_rows(None, here(gpu)))
    with Store.open(db, readonly=True) as store:
        return WINNER_COLUMNS, list(winner_rows(store, here(gpu)))


def _without_predicted_times(row: "Row") -> "Row":
    """In a table for people, what was only predicted must not look like a time."""
    times = ("winner_us", "margin") if row["source"] == "predicted" else ()
    return row | dict.fromkeys(times)


def _matches(
    row: "Row", wanted: Mapping[str, str | int], gpu: str | None, paged: bool | None
) -> bool:
    from autoflash.store.foreign import names

    return (
        all(row[column] == value for column, value in wanted.items())
        and (gpu is None or names(gpu, row["gpu"]))
        and (paged is None or (row["page_size"] > 0) == paged)
    )
