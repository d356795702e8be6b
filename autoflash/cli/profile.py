"""`autoflash profile`: what the kernels of a winner take, and what ncu sees of them."""

from dataclasses import astuple, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoflash.cli.explain import explained
from autoflash.cli.filters import AsCsv, Database, Filters, filtered
from autoflash.cli.notices import notice
from autoflash.cli.options import AsJson
from autoflash.cli.table import (
    Drawn,
    print_rows_as_csv,
    print_rows_as_json,
    print_table,
)

if TYPE_CHECKING:
    from autoflash.explain import Explanation
    from autoflash.records import Profile

SUMMARY = (
    *("number", "gpu", "problem", "family", "knobs", "registers", "spill_bytes", "smem_bytes"),
    *("occupancy_percent", "bound_by", "programs"),
)
DRAWN = Drawn(
    {"n": "number", "gpu": "gpu", "problem": "problem", "family": "family"}
    | {"regs": "registers", "spill bytes": "spill_bytes", "smem bytes": "smem_bytes"}
    | {"occupancy %": "occupancy_percent", "bound by": "bound_by", "programs": "programs"}
    | {"knobs": "knobs"},
    above=("gpu", "family", "regs", "spill bytes", "smem bytes", "occupancy %", "bound by"),
    spare=("programs", "knobs"),
)


@filtered
def profile(
    filters: Filters,
    number: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Of several winners, this one.")
    ] = None,
    db: Database = None,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """Compile a winner's kernels and tell registers, spills, shared memory and occupancy.

    On its GPU ncu, where it is installed, adds achieved occupancy and use of memory and tensor
    cores. All of it is stored. Several winners are a line each, as their trials recorded them; one
    of them is chosen by --number.
    """
    if as_json and as_csv:
        raise typer.BadParameter("--json or --csv, not both")
    found = explained(db, filters, number)
    if len(found) == 1:
        names, rows = _one(db, found[0][1])
    else:
        names, rows = SUMMARY, [_summary(place, one) for place, one in found]
        if found:
            notice("as recorded; --number N, or filters that leave one winner, compile it")
    if as_json:
        print_rows_as_json(names, rows)
    elif as_csv:
        print_rows_as_csv(names, rows)
    elif rows:
        print_table(names, rows, DRAWN if names == SUMMARY else None)
    else:
        notice("no measured winners are what was asked for")


def _one(db: Path | None, one: "Explanation") -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    from autoflash.kernel import CompileError
    from autoflash.problem import title
    from autoflash.profile import NotProfiled, watched
    from autoflash.profile import profile as taken
    from autoflash.records import Profile

    decision, gpu = one.winner.decision, one.winner.gpu
    notice(f"{title(decision.problem)}, on {gpu.name}: {decision.winner}")
    try:
        profiles = taken(decision.problem, decision.winner, gpu)
    except CompileError as error:
        from autoflash.errors import AutoflashError

        raise AutoflashError(f"it does not compile here: {error}") from None
    try:
        _refuse_another_gpu(gpu.identity)
        profiles = watched(profiles, decision.problem, decision.winner)
    except NotProfiled as reason:
        notice(f"not profiled: {reason}")
    for each in profiles:
        if each.spill_bytes:
            notice(f"{each.kernel} spills {each.spill_bytes} bytes a thread")
    _record(db, one, profiles)
    return tuple(field.name for field in fields(Profile)), [astuple(each) for each in profiles]


def _refuse_another_gpu(identity: tuple[Any, ...]) -> None:
    """Raises NotProfiled unless the winner's GPU type is here."""
    from autoflash.gpu import cuda_available, detect
    from autoflash.profile import NotProfiled

    if not cuda_available():
        raise NotProfiled("no GPU is here")
    if detect().identity != identity:
        raise NotProfiled("another GPU type is here")


def _record(db: Path | None, one: "Explanation", profiles: "list[Profile]") -> None:
    """Store the profiles in the database that was asked, which may be one nobody may write."""
    from autoflash.errors import StoreError
    from autoflash.store import Store, users_database
    from autoflash.toolchain import detect_toolchain

    path = db or users_database()
    if path is None:
        return
    try:
        with Store.open(path) as store:
            store.record_profiles(one.winner, detect_toolchain(), profiles)
    except StoreError as error:
        notice(f"the profile is not recorded: {error}")


def _summary(number: int, one: "Explanation") -> tuple[Any, ...]:
    decision, took, limits = one.winner.decision, one.resources, one.limits
    known = took.registers is not None
    return (
        number,
        one.winner.gpu.name,
        decision.problem,
        decision.winner.family,
        " ".join(f"{name}={value}" for name, value in decision.winner.knobs),
        took.registers,
        took.spill_bytes,
        took.smem_bytes,
        round(limits.occupancy.percent, 1) if known else None,
        limits.occupancy.binds if known else None,
        limits.programs,
    )
