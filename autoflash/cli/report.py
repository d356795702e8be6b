"""`autoflash report`: one HTML file of what was measured, for people."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoflash.cli.filters import Database, Filters, OfGpu
from autoflash.cli.notices import counted, notice, store_warnings_told

if TYPE_CHECKING:
    from autoflash.explain import Explanation


def report(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE.html", help="The file to write.")
    ] = Path("report.html"),
    gpu: OfGpu = None,
    results: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE.json", help="Results of `autoflash bench`; again for others."),
    ] = None,
    db: Database = None,
) -> None:
    """Write one HTML file: roofline, heat maps, searches, knobs, kernels, provenance.

    It needs no network and no other file. Winners without trials, as the shipped ones, are shown
    without what only trials tell.
    """
    from datetime import UTC, datetime

    from autoflash.errors import AutoflashError, StoreError
    from autoflash.report import page, read_results
    from autoflash.store.foreign import names
    from autoflash.whole_file import write_whole

    beside = []
    for path in results or []:
        found, incomplete = read_results(path)
        beside += [one for one in found if gpu is None or names(gpu, one.gpu)]
        if incomplete:
            notice(f"{path}: {incomplete} cases do not say their problem in full: left out")
    with store_warnings_told():
        explanations, runs = _measured(db, Filters.of(gpu, None))
    if not explanations:
        raise StoreError("no measured winners are what was asked for: there is nothing to report")
    text = page(explanations, runs, beside, datetime.now(UTC).strftime("%Y-%m-%d"))
    try:
        write_whole(output, text)
    except OSError as error:
        raise AutoflashError(f"cannot write {output}: {error.strerror}") from None
    told = (counted(len(explanations), "winner"), counted(len(runs), "run"))
    notice(f"{output}: {', '.join(told)}, {len(beside)} beside peers")


def _measured(db: Path | None, filters: Filters) -> "tuple[list[Explanation], list[Any]]":
    """The explanations, and the runs with their anytime curves."""
    from autoflash.explain import explanations
    from autoflash.store import Store, users_database
    from autoflash.store.runs import run_rows

    if db is None and users_database() is None:
        notice("you have no database yet: shipped winners only")
        told, left_out, runs = *explanations(None, filters.match), []
    else:
        with Store.open(db, readonly=True) as store:
            told, left_out = explanations(store, filters.match)
            kept = [row for row in run_rows(store) if filters.match(row)]
            runs = [(row, store.anytime(row["id"])) for row in kept]
    for reason in left_out:
        notice(f"left out: {reason}")
    return told, runs
