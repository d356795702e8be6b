"""`autoflash query`: winners and trials, filtered, or the answer to a question in SQL."""

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from autoflash.cli.notices import notice, store_warnings_told
from autoflash.cli.options import AsJson
from autoflash.cli.table import print_rows_as_csv, print_rows_as_json, print_table

if TYPE_CHECKING:
    from autoflash.store import Store

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
    filtered = bool(wanted) or gpu is not None or paged is not None
    if sql is not None and (filtered or trials):
        raise typer.BadParameter("--sql takes no filters: it has its own WHERE")
    if status is not None and not trials:
        raise typer.BadParameter("--status needs --trials: a winner is always correct")
    if as_json and as_csv:
        raise typer.BadParameter("--json or --csv, not both")
    with store_warnings_told():
        names, rows = _answer(db, sql, trials, gpu) if sql is None else _ask(db, sql)
        found = [row for row in rows if _matches(dict(zip(names, row)), wanted, gpu, paged)]
    shown = found if limit is None else found[:limit]
    if len(shown) < len(found):
        notice(f"{len(shown)} of {len(found)} rows")
    if as_json:
        print_rows_as_json(names, shown)
    elif as_csv:
        print_rows_as_csv(names, shown)
    elif not shown:
        notice("no rows")
    else:
        print_table(names, shown)
