"""What the benchmarks share: the exported module, a case of the results, and the results file."""

import argparse
import importlib.util
import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from queue import Empty, SimpleQueue
from types import ModuleType
from typing import Any

from autoflash.gpu import detect
from autoflash.peers.contender import told
from autoflash.toolchain import detect_toolchain

RESULTS = Path(__file__).resolve().parent / "results"


def load_module(path: Path) -> ModuleType:
    """The exported module at `path`."""
    found = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or found is None or found.loader is None:
        raise SystemExit(f"error: {path} is not a Python module; autoflash export writes one")
    module = importlib.util.module_from_spec(found)
    sys.modules[path.stem] = module
    found.loader.exec_module(module)
    return module


def run_ahead(jobs: Mapping[str, Callable[[], object]], processes: int) -> None:
    """Run jobs in so many processes, none where that is 0, for what they leave in caches on disk.

    One that raises is named, and so is one of which its process dies: it takes no other along. What
    is wrong shows again, and counts, where it is timed.
    """
    waiting: SimpleQueue[tuple[str, Callable[[], object]]] = SimpleQueue()
    for job in jobs.items():
        waiting.put(job)

    def serve() -> None:
        pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        while True:
            try:
                name, job = waiting.get_nowait()
            except Empty:
                return pool.shutdown()
            try:
                pool.submit(job).result()
            except Exception as error:
                print(f"not run ahead: {name}: {told(error)}", file=sys.stderr)
                if isinstance(error, BrokenProcessPool):
                    pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))

    if processes:
        with ThreadPoolExecutor(processes) as threads:
            for serving in [threads.submit(serve) for _ in range(processes)]:
                serving.result()


def case_result(
    case: Mapping[str, Any],
    times: Mapping[str, float],
    unavailable: Mapping[str, str],
    **more: Any,
) -> dict[str, Any]:
    """One entry of `cases`; `ratio` is the best live peer's time over ours."""
    peers = {name: round(us, 2) for name, us in times.items() if name != "autoflash"}
    ours = round(times["autoflash"], 2)
    ratio = round(min(peers.values()) / ours, 4) if peers else None
    result = {"case": dict(case), "unit": "us", "ours": ours, "peers": peers, "ratio": ratio}
    if unavailable:
        result["unavailable"] = dict(unavailable)
    return {**result, **more}


def geometric_mean(values: Sequence[float]) -> float:
    return statistics.geometric_mean(values) if values else float("nan")


def write_results(
    name: str,
    cases: Sequence[Mapping[str, Any]],
    peers: Mapping[str, str] | None = None,
    **more: Any,
) -> Path:
    """Write `results/<name>-<GPU>.json` with device, versions, command and date.

    `peers` are versions of what the peers come from, beside those of our own toolchain.
    """
    gpu, chain = detect(), detect_toolchain()
    path = RESULTS / f"{name}-{gpu.slug}.json"
    script = Path(sys.argv[0])
    command = shlex.join(["python", f"{script.parent.name}/{script.name}", *sys.argv[1:]])
    versions = {"driver": chain.driver, "torch": chain.torch, "triton": chain.triton}
    results = {
        "device": {"name": gpu.name, "arch": gpu.arch, "num_sms": gpu.num_sms},
        "versions": {**versions, **(peers or {})},
        "command": command,
        "date": datetime.now(UTC).date().isoformat(),
        **more,
        "cases": list(cases),
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
    return path


def tune(workload: Path, db: Path, effort: str) -> None:
    """Tune the workload into the database, as a user would."""
    command = [sys.executable, "-m", "autoflash", "tune", str(workload), "--db", str(db)]
    subprocess.run([*command, "--effort", effort], check=True)


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser with what every benchmark takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--module", type=Path, default=Path("attention_dispatch.py"))
    parser.add_argument("--cases", default="", help="only cases whose text contains this")
    return parser
