"""`autoflash verify --retime`: what an upgrade has changed about the winners."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from autoflash.cli.export import databases_of, winners_over
from autoflash.cli.notices import counted, notice
from autoflash.cli.options import print_json
from autoflash.cli.table import print_table

if TYPE_CHECKING:
    from autoflash.retime import Retimed

COLUMNS = ("problem", "state", "winner", "winner_us", "now_us", "best", "best_us")


def retime_winners(databases: list[Path], seed: int, as_json: bool) -> None:
    """Print how each winner of this GPU fares now. Raises DeviceError without a GPU."""
    from functools import partial

    from autoflash.cards import open_card
    from autoflash.errors import AutoflashError, DeviceError
    from autoflash.gpu import cuda_available
    from autoflash.retime import retime
    from autoflash.worker import Worker

    if not cuda_available():
        raise DeviceError("--retime measures, and torch sees no GPU on this machine")
    worker = Worker(partial(open_card, 0))
    try:
        gpu, toolchain = worker.hello()
        winners = [
            winner
            for winner in winners_over(databases_of(databases))
            if winner.gpu.identity == gpu.identity and winner.decision.source == "measured"
        ]
        if not winners:
            raise AutoflashError(f"no winner was measured on {gpu.name}")
        found = retime(winners, gpu, toolchain, worker, seed, told=_tell)
    finally:
        worker.close()
    report(found, as_json)


def report(found: list["Retimed"], as_json: bool) -> None:
    """Print the rows; exit with 1 if a winner is out."""
    rows = [_row(retimed) for retimed in found]
    if as_json:
        print_json([_as_object(retimed) for retimed in found])
    else:
        print_table(COLUMNS, rows)
    inverted = sum(retimed.inverted for retimed in found)
    stale, unverified = (
        sum(retimed.state == state for retimed in found) for state in ("stale", "unverified")
    )
    winners = counted(len(found), "winner")
    notice(f"{winners}: {inverted} inverted, {stale} stale, {unverified} unverified")
    if any(retimed.now_us is None for retimed in found):
        raise typer.Exit(1)


def _row(retimed: "Retimed") -> tuple[Any, ...]:
    from autoflash.problem import title

    best_us = dict(retimed.times).get(retimed.best) if retimed.best else None
    best = str(retimed.best) if retimed.inverted and retimed.best else ""
    told = (title(retimed.problem), retimed.state, str(retimed.winner))
    return (*told, retimed.winner_us, retimed.now_us, best, best_us)


def _as_object(retimed: "Retimed") -> dict[str, Any]:
    row = dict(zip(COLUMNS, _row(retimed), strict=True))
    times = {str(config): round(microseconds, 3) for config, microseconds in retimed.times}
    failed = {str(config): reason for config, reason in retimed.failed}
    return {**row, "inverted": retimed.inverted, "times_us": times, "failed": failed}


def _tell(retimed: "Retimed") -> None:
    from autoflash.problem import title

    now = "out" if retimed.now_us is None else f"{retimed.now_us:.1f} us"
    told = "inverted" if retimed.inverted else "stays"
    line = f"{title(retimed.problem)}: {retimed.state}, {retimed.winner_us:.1f} us, now {now}"
    print(f"{line}, {told}", file=sys.stderr, flush=True)
