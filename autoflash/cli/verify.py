"""`autoflash verify`: the contract put to the test, on a GPU or in an interpreter."""

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoflash.cli.notices import notice
from autoflash.cli.options import AsJson, Target, print_json, target_gpu
from autoflash.cli.retime import retime_winners
from autoflash.cli.table import print_table

if TYPE_CHECKING:
    from autoflash.findings import Finding
    from autoflash.gpu import Gpu
    from autoflash.verify import Unit

COLUMNS = ("clause", "cases", "broken", "left_out")
TOLD_EVERY_S = 5.0
MOST_JOBS = 16  # processes of one GPU, each of which compiles
JOB_GIB = 4  # of the GPU's memory, which they share


def verify(
    module: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A module that export wrote.")
    ] = None,
    family: Annotated[
        str | None, typer.Option(metavar="NAME", help="A kernel family, its default config.")
    ] = None,
    random: Annotated[
        int, typer.Option(min=0, help="With --family: so many random candidates too.")
    ] = 0,
    db: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="A database, again for others; yours without it."),
    ] = None,
    backward: Annotated[
        bool, typer.Option("--backward", help="Of a module or a database: its gradients instead.")
    ] = False,
    gpu: Target = None,
    small: Annotated[
        bool, typer.Option("--small", help="Few cases, as without a GPU; else thousands.")
    ] = False,
    clause: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A clause, again for others.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of inputs and of random candidates.")] = 0,
    retime: Annotated[
        bool,
        typer.Option("--retime", help="Time winners again; lists who wins now, and stale rows."),
    ] = False,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes at once, else one for each core up to 16.")
    ] = None,
    junit: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write a JUnit report.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Put the contract of docs/contract.md to the test.

    Of an exported module, of a family, or else of the winners of the databases. Without a GPU it
    runs few cases in an interpreter. The exit status is 1 if any case breaks a clause.

    After an upgrade, --retime times the winners again beside those that were nearly as fast and the
    defaults. It stores nothing; the exit status is 1 if a winner is no longer right.
    """
    from functools import partial

    from autoflash.errors import AutoflashError
    from autoflash.findings import broken, by_clause
    from autoflash.findings import junit as junit_report
    from autoflash.gpu import cuda_available
    from autoflash.verify import INTERPRET, Examiner, examined
    from autoflash.whole_file import write_whole

    if bool(module) + bool(family) + retime > 1:
        raise typer.BadParameter("give one of --module, --family and --retime")
    if retime:
        retime_winners(db or [], seed, as_json)
        return
    on_gpu, target = cuda_available(), target_gpu(gpu)
    small = small or not on_gpu
    units = _units(module, family, random, db or [], backward, target, small, seed)
    units = _of_clauses(units, clause or [])
    cases = sum(len(unit.cases) for unit in units)
    if not cases:
        raise AutoflashError("nothing to verify: no case is left")
    notice(f"{cases} cases on {target.name}" + ("" if on_gpu else ", in an interpreter"))
    counter = _Counter(cases)
    try:
        findings = examined(
            units,
            partial(Examiner, "cuda" if on_gpu else "cpu", target, seed),
            environment={} if on_gpu else INTERPRET,
            jobs=jobs or jobs_of(target, on_gpu),
            told=counter.told,
        )
    except KeyboardInterrupt:
        notice(f"interrupted: this is of {len(counter.findings)} of the {cases} cases")
        print_table(COLUMNS, by_clause(counter.findings))
        raise
    if junit:
        try:
            write_whole(junit, junit_report(findings))
        except OSError as error:
            raise AutoflashError(f"{junit}: cannot be written: {error.strerror}") from None
    if as_json:
        print_json(_as_json(findings, target))
    else:
        print_table(COLUMNS, by_clause(findings))
    if broken(findings):
        raise typer.Exit(1)


def jobs_of(gpu: "Gpu", on_gpu: bool) -> int:
    """How many processes compile and check at once: most of the time goes into compiling."""
    most = min(os.cpu_count() or 1, MOST_JOBS)
    return max(1, min(most, gpu.memory_gib // JOB_GIB)) if on_gpu else most


def _units(
    module: Path | None,
    family: str | None,
    random: int,
    databases: list[Path],
    backward: bool,
    gpu: "Gpu",
    small: bool,
    seed: int,
) -> list["Unit"]:
    from autoflash import verify
    from autoflash.errors import AutoflashError
    from autoflash.families import family_of
    from autoflash.gpu import cuda_available
    from autoflash.subjects import exported_module, tuned_problems

    if module:
        loaded = exported_module(module)  # a file that is none is told of at once
        tuned = [] if small else tuned_problems(loaded, gpu.name)
        if backward and ("backward",) not in loaded.installed().tables.names:
            raise AutoflashError(f"{module}: carries no backward, so there is no gradient to ask")
        return verify.of_module(module.resolve(), small, tuned, backward)
    if family:
        return verify.of_family(family_of(family), gpu, small, random, seed)
    from autoflash.cli.export import databases_of, winners_over

    winners = [w for w in winners_over(databases_of(databases)) if w.gpu.name == gpu.name]
    if not cuda_available():
        winners = [w for w in winners if family_of(w.decision.winner.family).interpretable]
    asked = [w for w in winners if (w.decision.problem.op == "backward") == backward]
    if len(asked) < len(winners):
        others = "forward" if backward else "backward"
        notice(f"winners of the {others} are left out; --backward asks for gradients alone")
    return verify.of_winners(asked, gpu, small)


def _of_clauses(units: list["Unit"], wanted: list[str]) -> list["Unit"]:
    """The units with the cases of these clauses, of all where none is given."""
    from dataclasses import replace

    from autoflash.probes import CLAUSES

    unknown = [name for name in wanted if name not in CLAUSES]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(CLAUSES)}")
    if not wanted:
        return units
    return [
        replace(unit, cases=tuple(case for case in unit.cases if case.clause in wanted))
        for unit in units
    ]


class _Counter:
    """Tells on stderr how far it is, from time to time, and of every breach at once."""

    def __init__(self, cases: int) -> None:
        self.findings: list[Finding] = []
        self._cases, self._broken = cases, 0
        self._began = self._last_told = time.monotonic()

    def told(self, finding: "Finding") -> None:
        now = time.monotonic()
        self.findings.append(finding)
        if finding.reason:
            self._broken += finding.broken
            what = "broken" if finding.broken else "left out"
            where = f"{finding.case.clause}: {finding.case.name}: {finding.told}"
            print(f"{what}: {where}: {finding.reason}", file=sys.stderr, flush=True)
        if now - self._last_told >= TOLD_EVERY_S or len(self.findings) == self._cases:
            self._last_told = now
            done = f"{len(self.findings)} of {self._cases} cases, {self._broken} broken"
            print(f"{done}, {now - self._began:.0f} s", file=sys.stderr, flush=True)


def _as_json(findings: list["Finding"], gpu: "Gpu") -> dict[str, Any]:
    from dataclasses import asdict

    from autoflash.findings import by_clause
    from autoflash.toolchain import detect_toolchain

    return {
        "gpu": gpu.name,
        "toolchain": asdict(detect_toolchain()),
        "clauses": [dict(zip(COLUMNS, row, strict=True)) for row in by_clause(findings)],
        "breaches": [
            {
                "clause": finding.case.clause,
                "case": finding.case.name,
                "subject": str(finding.told),
                "reason": finding.reason,
            }
            for finding in findings
            if finding.reason
        ],
    }
