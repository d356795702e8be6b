"""`autoflash bench`: the exported module beside other implementations, on a GPU."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoflash.cli.filters import AsCsv, Database, OfOp
from autoflash.cli.notices import notice, store_warnings_told
from autoflash.cli.options import AsJson, print_json
from autoflash.cli.table import Drawn, print_rows_as_csv, print_table

if TYPE_CHECKING:
    from types import ModuleType

    from autoflash.gpu import Gpu
    from autoflash.peers import Maker
    from autoflash.problem import Problem
    from autoflash.versus import Versus

COLUMNS = (
    *("problem", "contender", "us", "p20_us", "p80_us", "p99_us", "host_us", "gbps", "tflops"),
    *("percent_of_roofline", "launches", "temporary_bytes", "error", "best_peer_ratio"),
)
TAILS = 5  # a thousand calls that are waited for may take so many times --gpu-ms
DRAWN = Drawn(
    {name: name for name in ("problem", "contender", "us", "p99_us", "host_us", "gbps", "tflops")}
    | {"roof %": "percent_of_roofline", "launches": "launches"}
    | {"best peer ratio": "best_peer_ratio", "error": "error"},
    above=("error",),
    spare=("launches", "gbps", "p99_us"),
)


def bench(
    workload: Annotated[Path, typer.Argument(metavar="WORKLOAD", help="A YAML file.")],
    against: Annotated[
        list[str] | None,
        typer.Option(metavar="PEER", help="A peer, again for others; all without it."),
    ] = None,
    module: Annotated[
        Path | None,
        typer.Option(metavar="NAME.py", help="An exported module, else one is exported of --db."),
    ] = None,
    db: Database = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE.json", help="Write all figures to a file."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Draw each peer's time over ours.")
    ] = None,
    op: OfOp = None,
    gpu_ms: Annotated[
        float, typer.Option(min=1.0, help="Of GPU time for a contender of a problem.")
    ] = 400.0,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """Time the exported module beside other implementations, all in one interleaved run.

    Each peer is called as its users call it, and its output judged as ours is. One that is not
    installed, or cannot do a problem, is named with the reason. A backward is that of autograd,
    after a forward that is not timed. `best_peer_ratio` is the best peer's time over ours: above 1,
    ours is faster.
    """
    if as_json and as_csv:
        raise typer.BadParameter("--json or --csv, not both")
    from functools import partial

    from autoflash.errors import DeviceError
    from autoflash.gauges import gauged
    from autoflash.gpu import detect
    from autoflash.peers import PEERS, peer_versions
    from autoflash.turns import STEADY, interleaved
    from autoflash.versus import summary_of, versus
    from autoflash.workload import load_workload

    known = sorted({name for of_op in PEERS.values() for name in of_op})
    for name in against or []:
        if name not in known:
            raise typer.BadParameter(f"no peer is called {name}; known are {', '.join(known)}")
    problems = [each for each in load_workload(workload).problems if op in (None, each[0].op)]
    try:
        gpu = detect()
    except DeviceError:
        installed = [f"{name} {version}" for name, version in peer_versions().items()]
        notice(f"peers installed here: {', '.join(installed)}, and those of torch itself")
        raise
    ours = load_exported(module or _exported(db))
    found: list[Versus] = []
    for problem, weight in problems:
        makers = makers_of(ours, problem, against)
        captured = problem.op != "backward"
        time_all = partial(interleaved, gpu_us=1e3 * gpu_ms, pace=STEADY, captured=captured)
        gauge_all = partial(gauged, seconds=TAILS * gpu_ms / 1e3)
        found.append(versus(problem, weight, gpu, makers, time_all, gauge_all))
        _tell_left_out(found[-1])
        if output:  # a peer that ends the process leaves what was done before
            _write(output, _results(found, gpu))
        _free_memory()
    if plot:
        from autoflash.report.plots import ratios

        _write(plot, ratios(found))
    for of_op, figures in summary_of(found).items():
        mean, worst = figures["geometric_mean"], figures["worst"]
        cases = figures["cases"]
        notice(f"{of_op}: best peer / autoflash {mean:.3f}, worst {worst:.3f}, of {cases} problems")
    rows = [row for one in found for row in rows_of(one, gpu)]
    if as_json:
        print_json(_results(found, gpu))
    elif as_csv:
        print_rows_as_csv(COLUMNS, rows)
    else:
        print_table(COLUMNS, rows, DRAWN)


def makers_of(
    module: "ModuleType", problem: "Problem", against: Sequence[str] | None
) -> "dict[str, Maker]":
    """Who takes part: the exported module and the peers that were asked for."""
    from functools import partial

    from autoflash.peers import PEERS, Unavailable, backward, ours
    from autoflash.versus import OURS

    first = {
        "prefill": partial(ours.prefill, module),
        "decode": partial(ours.decode, module, ours.hints_of(problem)),
        "backward": partial(backward.differentiated, partial(ours.prefill, module), None),
    }[problem.op]
    there = PEERS[problem.op]

    def absent(inputs: Any) -> Any:
        raise Unavailable(f"it has no adapter for {problem.op}")

    return {OURS: first} | {name: there.get(name, absent) for name in against or there}


def rows_of(one: "Versus", gpu: "Gpu") -> list[tuple[Any, ...]]:
    """A row for each contender of a problem, ours first, then the fastest."""
    from autoflash.roofline import floor
    from autoflash.versus import OURS

    work = floor(one.problem, gpu)
    ordered = sorted(one.figures, key=lambda name: (name != OURS, one.figures[name].median_us))
    rows = []
    for name in ordered:
        each = one.figures[name]
        us, cost = each.median_us, each.gauged
        rates = (work.gbps(us), work.tflops(us), work.percent(us))
        mark = f"{name} (imprecise)" if name in one.imprecise else name
        rows.append(
            (
                *(one.problem, mark, us, each.p20_us, each.p80_us),
                *(cost.p99_us, cost.host_us, *rates, cost.launches, cost.temporary_bytes),
                *(each.error, one.ratio if name == OURS else None),
            )
        )
    return rows


def load_exported(path: Path) -> "ModuleType":
    """The exported module at `path`. Raises AutoflashError for a file that is none."""
    import importlib.util
    import sys

    from autoflash.errors import AutoflashError

    found = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or found is None or found.loader is None:
        raise AutoflashError(f"{path}: is no exported module; `autoflash export` writes one")
    module = importlib.util.module_from_spec(found)
    sys.modules[path.stem] = module
    found.loader.exec_module(module)
    if not hasattr(module, "prefill") or not hasattr(module, "decode"):
        raise AutoflashError(f"{path}: is no exported module: it lacks prefill and decode")
    return module


def _exported(db: Path | None) -> Path:
    """A module of the database's winners over the shipped ones, in a folder of its own."""
    import tempfile

    from autoflash.export import export, write_module
    from autoflash.store import Store, overlaid_winners, users_database

    with store_warnings_told():
        if db is None and users_database() is None:
            winners = overlaid_winners(None)
        else:
            with Store.open(db, readonly=True) as store:
                winners = overlaid_winners(store)
    path = Path(tempfile.mkdtemp(prefix="autoflash-bench-")) / "attention_dispatch.py"
    write_module(export(winners), path)
    return path


def _results(found: "Sequence[Versus]", gpu: "Gpu") -> dict[str, Any]:
    """What a results file holds: device, versions, command, date, cases."""
    import shlex
    import sys
    from datetime import UTC, datetime

    from autoflash.peers import peer_versions
    from autoflash.toolchain import detect_toolchain
    from autoflash.versus import case_of, summary_of

    chain = detect_toolchain()
    versions = {"driver": chain.driver, "torch": chain.torch, "triton": chain.triton}
    return {
        "device": {"name": gpu.name, "arch": gpu.arch, "num_sms": gpu.num_sms},
        "versions": {**versions, **peer_versions()},
        "command": shlex.join(["autoflash", *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
        "summary": summary_of(found),
        "cases": [case_of(one, gpu) for one in found],
    }


def _write(path: Path, content: Any) -> None:
    import json

    from autoflash.errors import AutoflashError
    from autoflash.whole_file import write_whole

    text = content if isinstance(content, str) else json.dumps(content, indent=1) + "\n"
    try:
        write_whole(path, text)
    except OSError as error:
        raise AutoflashError(f"cannot write {path}: {error.strerror}") from None


def _tell_left_out(one: "Versus") -> None:
    from autoflash.problem import title

    for name, reason in one.left_out.items():
        notice(f"{title(one.problem)}: {name} is left out: {reason}")
    for name, reason in one.imprecise.items():
        notice(f"{title(one.problem)}: {name} is not counted: {reason}")


def _free_memory() -> None:
    import gc

    import torch

    gc.collect()
    torch.cuda.empty_cache()
