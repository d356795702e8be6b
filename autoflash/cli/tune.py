"""`autoflash tune`: search the problems of a workload, or predict for a GPU that is not here."""

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from autoflash.cli.notices import counted, notice, store_warnings_told
from autoflash.cli.options import AsJson, print_json
from autoflash.cli.table import print_table

if TYPE_CHECKING:
    from autoflash.records import Decision
    from autoflash.tune import TuneResult
    from autoflash.workload import Workload

SECONDS = {"s": 1, "m": 60, "h": 3600}


def budget_seconds(text: str) -> float:
    """The seconds of `90s`, `10m` or `1.5h`. Raises typer.BadParameter for anything else."""
    given = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smh])", text)
    seconds = float(given[1]) * SECONDS[given[2]] if given else 0.0
    if seconds <= 0:
        raise typer.BadParameter(f"{text!r} is not a positive time such as 90s, 10m or 1h")
    return seconds


def tune(
    workload: Annotated[
        Path | None, typer.Argument(metavar="WORKLOAD", help="A YAML file, or else --from-trace.")
    ] = None,
    from_trace: Annotated[
        Path | None,
        typer.Option("--from-trace", metavar="FILE", help="Calls that an exported module wrote."),
    ] = None,
    db: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The database, else $AUTOFLASH_DB, else yours."),
    ] = None,
    gpu: Annotated[
        int, typer.Option(metavar="INDEX", min=0, help="Which one of several GPUs.")
    ] = 0,
    several: Annotated[
        str | None,
        typer.Option("--gpus", metavar="all|LIST", help="Several GPUs at once: all, or 0,1,3."),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="All GPUs of a Ray cluster; auto is this host's."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Only predict, for a known GPU; without one, for H200."),
    ] = None,
    effort: Annotated[
        Literal["quick", "standard", "max"], typer.Option(help="How much is tried and how often.")
    ] = "standard",
    budget: Annotated[
        float | None,
        typer.Option(parser=budget_seconds, metavar="TIME", help="A hard limit: 90s, 10m, 1h."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of inputs, samples and orders.")] = 0,
    strategy: Annotated[
        Literal["auto", "exhaustive", "promising", "hill_climb", "random"],
        typer.Option(help="Which candidates are tried."),
    ] = "auto",
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Only tell what would be tried and how long it may take."),
    ] = False,
    lock_clocks: Annotated[
        bool,
        typer.Option("--lock-clocks", help="Hold the GPU's clock while it is tuned, if allowed."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Find the fastest correct kernel config for every problem of a workload.

    Every trial is stored once it is made: stopped and run again, it goes on from there. Without a
    GPU it compiles, checks in an interpreter and predicts, and says so.
    """
    from autoflash.tune import tune as tuned

    if (workload is None) == (from_trace is None):
        raise typer.BadParameter("give either a workload or --from-trace")
    if several is not None and (gpu or target):
        raise typer.BadParameter("--gpus goes with neither --gpu nor --target")
    if ray is not None and (gpu or target or several is not None or dry_run or lock_clocks):
        told = "--ray goes with none of --gpu, --gpus, --target, --dry-run and --lock-clocks"
        raise typer.BadParameter(told)
    asked: dict[str, Any] = {
        "effort": effort,
        "budget_s": budget,
        "seed": seed,
        "strategy": strategy,
        "argv": sys.argv[1:],
        "lock_clocks": lock_clocks,
    }
    if dry_run:
        with store_warnings_told():
            _forecast(_loaded(workload, from_trace), db, gpu, several, target, asked, as_json)
        return
    with store_warnings_told():
        loaded = _loaded(workload, from_trace)
        if ray is not None:
            from autoflash.cluster import tune_on_ray

            results = tune_on_ray(loaded, ray, db=db, **asked)
        elif several is None:
            results = [tuned(loaded, db=db, gpu_index=gpu, target=target, **asked)]
        else:
            from autoflash.fleet import tune_on_chosen

            results = tune_on_chosen(loaded, several, db=db, **asked)
    for result in results:
        _tell(result)
    if as_json:
        objects = [_as_json(result) for result in results]
        print_json(objects[0] if several is None and ray is None else {"results": objects})
        return
    rows = [(result.gpu.name, _as_object(d)) for result in results for d in result.decisions]
    of_types = len(results) > 1
    named = [({"gpu": name} if of_types else {}) | decision for name, decision in rows]
    if named:
        print_table(list(named[0]), [list(each.values()) for each in named])


def _loaded(workload: Path | None, from_trace: Path | None) -> "Workload":
    """The workload's problems, or those of a trace that may save the most time first."""
    if from_trace is not None:
        from autoflash.gpu import cuda_available, detect
        from autoflash.trace import load_trace, traced_workload

        gpu = detect() if cuda_available() else None
        return traced_workload(from_trace, load_trace(from_trace), gpu)
    from autoflash.workload import load_workload

    assert workload is not None
    return load_workload(workload)


def _forecast(
    workload: "Workload",
    db: Path | None,
    gpu: int,
    several: str | None,
    target: str | None,
    asked: dict[str, Any],
    as_json: bool,
) -> None:
    """What a search would try, a row a problem and GPU type."""
    from autoflash.forecast import forecasts, gpu_types
    from autoflash.problem import title
    from autoflash.toolchain import detect_toolchain
    from autoflash.tune import options_for

    options, toolchain = options_for(**asked), detect_toolchain()
    rows, seconds, by_roofline = [], [], False
    for of_type, count in gpu_types(several, gpu, target):
        told = forecasts(workload, of_type, toolchain, options, db, count)
        rows += [
            {
                "gpu": of_type.name,
                "problem": title(each.problem),
                "candidates": each.candidates,
                "tried": each.tried,
                "known": each.known,
                "compiles": each.compiles,
                "seconds": round(each.seconds, 1),
                "seconds_by": "roofline, timing alone" if each.from_roofline else "earlier runs",
                "why_not": each.why,
            }
            for each in told
        ]
        seconds.append(sum(each.seconds for each in told))
        by_roofline |= any(each.from_roofline for each in told)
    if as_json:
        print_json({"forecast": rows, "seconds": round(max(seconds), 1)})
    else:
        print_table(list(rows[0]), [list(row.values()) for row in rows])
    beside = " of timing, beside compiling and checking" if by_roofline else ""
    notice(f"nothing was started; it would take about {max(seconds):.0f} s{beside}")


def _tell(result: "TuneResult") -> None:
    """What a run came to, as notices."""
    from autoflash.problem import title

    for problem, why in result.undecided:
        notice(f"undecided: {title(problem)}: {why}")
    notice(
        f"{counted(len(result.decisions), 'problem')} decided by {counted(result.trials, 'trial')} "
        f"and {result.reused} earlier in {result.seconds:.0f} s, in {result.db}"
    )
    if result.busy is not None:
        gpus, processes = (100 * share for share in (result.busy.gpus, result.busy.processes))
        notice(
            f"the GPU was at work for {gpus:.0f} % of the time, its process for {processes:.0f} %"
        )


def _as_json(result: "TuneResult") -> dict[str, Any]:
    """A run for scripts."""
    from autoflash.problem import title

    return {
        "gpu": result.gpu.name,
        "db": str(result.db),
        "run_id": result.run_id,
        "gpu_busy": result.busy.gpus if result.busy else None,
        "process_busy": result.busy.processes if result.busy else None,
        "anytime": _curves(result),
        "decisions": [_as_object(decision) for decision in result.decisions],
        "undecided": [{"problem": title(p), "reason": why} for p, why in result.undecided],
    }


def _curves(result: "TuneResult") -> list[dict[str, str]]:
    """For each problem, `seconds:microseconds` of every time that was the best until then."""
    from autoflash.problem import title

    return [
        {"problem": title(problem), "curve": " ".join(f"{s:.3f}:{us:.3f}" for s, us in points)}
        for problem, points in result.anytime
    ]


def _as_object(decision: "Decision") -> dict[str, Any]:
    """A decision for people and scripts. What is predicted has no times."""
    from autoflash.problem import title

    measured = decision.source == "measured"
    return {
        "problem": title(decision.problem),
        "winner": str(decision.winner),
        "winner_us": decision.winner_us if measured else None,
        "default_us": decision.default_us if measured else None,
        "margin_percent": round(100 * decision.margin, 2) if measured else None,
        "source": decision.source,
    }
