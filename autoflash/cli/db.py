"""`autoflash db`: where the database is, whether it is sound, merging, winners in and out."""

from pathlib import Path
from typing import Annotated

import typer

from autoflash.cli.notices import counted, notice, store_warnings_told
from autoflash.cli.options import AsJson
from autoflash.cli.query import Database
from autoflash.cli.table import print_rows_as_json, print_table

app = typer.Typer(
    help="The database itself: where it is, merging, winners in and out, whether it is sound.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command("path")
def path(db: Database = None) -> None:
    """Print the path of the database that the other commands would use."""
    from autoflash.store import default_path

    print(db or default_path())


@app.command("schema")
def schema() -> None:
    """Print the tables and views as SQL."""
    from autoflash.store.schema import schema_sql

    print(schema_sql(), end="")


@app.command("dump")
def dump(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where the files go.")
    ],
    db: Database = None,
) -> None:
    """Write the winners to FOLDER, one file for each GPU name, one line for each winner.

    Lines already there stay, unless a line for the same GPU, problem and versions replaces them.
    """
    from autoflash.store import Store, dump_winners

    with store_warnings_told(), Store.open(db, readonly=True) as store:
        written = dump_winners(store.winners(), output)
    for file in written:
        print(file)
    if not written:
        notice("the database holds no winners")


@app.command("load")
def load(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="What `dump` wrote.")],
    db: Database = None,
) -> None:
    """Add the winners of files to the database; those it has already are left alone."""
    from autoflash.store import Store, load_winners

    with store_warnings_told(), Store.open(db) as store:
        for file in files:
            new = load_winners(store, file)
            if new or file.read_text(encoding="utf-8").strip():
                print(f"{file}: {counted(new, 'new winner')}")
            else:
                notice(f"{file}: holds no winners")


@app.command("merge")
def merge(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Databases to read.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where all of it goes.")
    ],
) -> None:
    """Put every row of several databases into one, which may be there already.

    All GPUs, runs, trials and decisions are kept. What is there already is not doubled: a database
    merged again brings only what is new. The winner is the latest decision on a problem, as in any
    database. Nothing is written unless all files can be read.
    """
    from autoflash.store.merging import merge as merged

    with store_warnings_told():
        for each in merged(files, output):
            print(
                f"{each.path}: {each.runs} new runs, {each.trials} new trials, "
                f"{each.decisions} new decisions"
            )


@app.command("check")
def check(db: Database = None, as_json: AsJson = False) -> None:
    """Say whether the database is sound, and what in it belongs to nothing."""
    from autoflash.errors import StoreError
    from autoflash.store import Store
    from autoflash.store.checking import check as checked

    with store_warnings_told(), Store.open(db, readonly=True) as store:
        findings = checked(store)
    names = ("name", "count", "bad", "detail")
    rows = [(each.name, each.count, each.bad, each.detail) for each in findings]
    if as_json:
        print_rows_as_json(names, rows)
    else:
        print_table(("found", "rows", "what"), [(r[0], r[1], r[3]) for r in rows])
    damaged = [each.name for each in findings if each.bad]
    if damaged:
        raise StoreError(f"{store.path}: {', '.join(damaged)}")
