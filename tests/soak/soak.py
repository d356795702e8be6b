"""Soak: a search among planted faults whose processes are killed at random, against a clean one.

`python tests/soak/soak.py` needs no GPU: without one the device is a fake, and the processes, their
deaths and the database are real. It exits with 0 if the database is whole, every fault has its
status, the winners are those of the clean search, and no process is left.
"""

import argparse
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[2]), *(str(HERE.parents[1] / part) for part in ("unit", "gpu"))]

from fake_device import SHORT, FakeCompiler, FakeDevice  # noqa: E402

from autoflash.check import Stage  # noqa: E402
from autoflash.config import Config  # noqa: E402
from autoflash.families import family_of  # noqa: E402
from autoflash.gpu import Gpu  # noqa: E402
from autoflash.pool import TritonCompiler  # noqa: E402
from autoflash.problem import Problem  # noqa: E402
from autoflash.records import Decision, Resources, Trial  # noqa: E402
from autoflash.store import Store  # noqa: E402
from autoflash.tune import Machine, this_machine, tune  # noqa: E402
from autoflash.worker import Deadlines  # noqa: E402
from autoflash.workload import Workload  # noqa: E402

# each a group of its own, together more than 200 candidates
PROBLEMS = (
    Problem("prefill", "bf16", 4, 32, 8, 64, 2048, 2048),
    Problem("prefill", "bf16", 1, 4, 4, 64, 4096, 4096),
    Problem("decode", "bf16", 8, 8, 2, 64, 1, 1024),
)
Candidate = tuple[Problem, Config]
SEED = 7
# each fault with the status that it must end in
DEVICE_FAULTS = {
    "out_of_bounds": "runtime",
    "hang": "timeout",
    "abort": "runtime",
    "killed": "runtime",
    "gpu memory": "runtime",
    "wrong": "correctness",
    "unrepeatable": "correctness",
    "trespass": "correctness",
}
COMPILE_FAULTS = {"ptxas": "timeout", "abort": "compile", "memory": "compile"}
FAULTS = [("device", fault) for fault in DEVICE_FAULTS] + [("compile", f) for f in COMPILE_FAULTS]
STATUSES = {"device": DEVICE_FAULTS, "compile": COMPILE_FAULTS}
KINDS = ("worker", "compiler", "parent")
SETTLED_S = 1.0  # a process is killed at work, not before: then the same call could be hit twice


@dataclass(frozen=True)
class Soak:
    """How much is tried, how many faults are planted, and how often something is killed.

    The strategy is one that tries the same candidates whatever becomes of them.
    """

    effort: str = "standard"
    strategy: str = "exhaustive"
    faults: int = 30
    kills: int = 12
    pause_s: tuple[float, float] = (1.5, 4.0)
    seed: int = SEED
    problems: int = len(PROBLEMS)


def marked(folder: str, kind: str, make: Callable[[], Any]) -> Any:
    """The service, its process noted in the folder so that it can be killed by kind."""
    Path(folder, f"{kind}-{os.getpid()}").touch()
    return make()


def search(folder: Path) -> None:
    """One search as a user would start it, in this process; the plan lies in the folder."""
    plan = json.loads((folder / "plan.json").read_text())
    planted = _machine(*(dict(_candidates(plan[place])) for place in ("device", "compile")))
    machine = replace(
        planted,
        device=partial(marked, str(folder), "worker", planted.device),
        compiler=partial(marked, str(folder), "compiler", planted.compiler),
    )
    workload = Workload("soak", tuple((problem, 1.0) for problem in PROBLEMS[: plan["problems"]]))
    tune(workload, db=folder / "tune.db", machine=machine, **plan["options"])


def _machine(device: dict[Candidate, str], compiler: dict[Candidate, str]) -> Machine:
    """This machine's GPU or a fake one, with the faults of its device and of its compiler."""
    if this_machine().device is None:
        fakes = partial(FakeDevice, device), partial(FakeCompiler, compiler)
        return Machine(*fakes, deadlines=SHORT, compile_processes=1)
    from planted_device import PlantedDevice

    deadlines = Deadlines(compile_s=30.0, check_s=15.0, time_s=15.0)
    return Machine(partial(PlantedDevice, device), partial(PlantedCompiler, compiler), deadlines)


class PlantedCompiler(TritonCompiler):
    """The real compiler with the faults of the fake one."""

    def __init__(self, faults: dict[Candidate, str]) -> None:
        super().__init__()
        self._faults = FakeCompiler(faults)

    def compile(
        self,
        problems: Sequence[Problem],
        config: Config,
        gpu: Gpu,
        stage: Stage | None = None,
    ) -> Resources:
        self._faults.meet(problems[0], config)
        return super().compile(problems, config, gpu, stage)


def _candidates(planted: list) -> Iterator[tuple[Candidate, str]]:
    for number, family, knobs, fault in planted:
        yield (PROBLEMS[number], Config.of(family, knobs)), fault


def run(soak: Soak, folder: Path) -> list[str]:
    """What went wrong, one line each; nothing where all is well."""
    clean, soaked = folder / "clean", folder / "soaked"
    draw = random.Random(soak.seed)
    _plan(clean, soak, {})
    _search_until_done(clean, replace(soak, kills=0), draw)
    decisions, tried = _outcome(clean)
    finalists = {(d.problem, config) for d in decisions for config, _ in d.times}
    planted = _planted(soak, draw, sorted(tried - finalists, key=str), tried)
    _plan(soaked, soak, planted)
    killed = _search_until_done(soaked, soak, draw)
    print(f"{len(tried)} candidates, {len(planted)} faults, killed: {', '.join(killed) or 'none'}")
    wrong = _wrong(soaked, planted)
    after, _ = _outcome(soaked)
    if [d.problem for d in after] != [d.problem for d in decisions]:
        wrong.append("not every problem is decided")
    for now, before in zip(after, decisions):
        # no two searches time alike
        tied = now.winner in (before.winner, *before.tied) or before.winner in now.tied
        if not tied:
            wrong.append(f"the winner is {now.winner}, of the clean search {before.winner}")
    if len(set(killed)) < min(len(KINDS), soak.kills):
        wrong.append(f"the search ended before one of each was killed: {killed}")
    return wrong


def _planted(
    soak: Soak, draw: random.Random, free: list[Candidate], tried: set[Candidate]
) -> dict[Candidate, tuple[str, str]]:
    """Faults of every kind in turn; what breaks a compiler has a binary of its own."""
    draw.shuffle(free)
    binaries = Counter((problem, _binary(config)) for problem, config in tried)
    alone = [(p, config) for p, config in free if binaries[p, _binary(config)] == 1]
    shared = [candidate for candidate in free if candidate not in alone]
    planted = {}
    for number in range(soak.faults):
        place, fault = FAULTS[number % len(FAULTS)]
        planted[(shared if shared and place == "device" else alone).pop()] = (place, fault)
    return planted


def _binary(config: Config) -> Config:
    return family_of(config.family).binary(config)


def _plan(folder: Path, soak: Soak, planted: dict[Candidate, tuple[str, str]]) -> None:
    folder.mkdir()
    plan: dict = {place: [] for place in STATUSES}
    plan |= {"options": {"effort": soak.effort, "strategy": soak.strategy, "seed": soak.seed}}
    plan["problems"] = soak.problems
    for (problem, config), (place, fault) in planted.items():
        subject = _binary(config) if place == "compile" else config
        number = PROBLEMS.index(problem)
        plan[place].append((number, subject.family, subject.as_dict(), fault))
    (folder / "plan.json").write_text(json.dumps(plan))


def _search_until_done(folder: Path, soak: Soak, draw: random.Random) -> list[str]:
    """Search, kill something now and then, start again after a killed parent; what was killed."""
    killed = []
    due = time.monotonic() + draw.uniform(*soak.pause_s)
    process = _start(folder)
    while True:
        try:
            code = process.wait(0.05)
        except subprocess.TimeoutExpired:
            kind = KINDS[len(killed) % len(KINDS)]
            if len(killed) < soak.kills and time.monotonic() > due and _kill(folder, kind, process):
                killed.append(kind)
                due = time.monotonic() + draw.uniform(*soak.pause_s)
            continue
        if code == 0:
            return killed
        if code != -signal.SIGKILL:
            raise SystemExit(f"the search ended with {code}")
        process = _start(folder)


def _start(folder: Path) -> subprocess.Popen:
    # as a module: what the search's own processes are made of is found there again
    start = "import pathlib, soak, sys; soak.search(pathlib.Path(sys.argv[1]))"
    paths = os.pathsep.join([str(HERE.parent), *(path for path in sys.path if path)])
    environment = os.environ | {"SOAK": str(folder), "PYTHONPATH": paths}
    return subprocess.Popen([sys.executable, "-c", start, str(folder)], env=environment)


def _kill(folder: Path, kind: str, parent: subprocess.Popen) -> bool:
    """Kill a process of this kind that has been at work for a while, if there is one."""
    if kind == "parent":
        if not any(_at_work(folder, child) for child in ("worker", "compiler")):
            return False  # it does not search yet
        parent.kill()
        return True
    for pid in _at_work(folder, kind):
        os.kill(pid, signal.SIGKILL)
        return True
    return False


def _at_work(folder: Path, kind: str) -> list[int]:
    old = [p for p in folder.glob(f"{kind}-*") if time.time() - p.stat().st_mtime > SETTLED_S]
    running = set(_left(folder))
    return [pid for pid in (int(path.name.partition("-")[2]) for path in old) if pid in running]


def _left(folder: Path) -> list[int]:
    """The processes of a search, whoever started them."""
    found, mark = [], f"SOAK={folder}".encode()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in environ.read_bytes().split(b"\0"):
                found.append(int(environ.parent.name))
        except OSError:  # it ended, or is another user's
            continue
    return found


def _outcome(folder: Path) -> tuple[list[Decision], set[Candidate]]:
    """The decisions, and the candidates of all trials."""
    with Store.open(folder / "tune.db", readonly=True) as store:
        decisions = [winner.decision for winner in store.winners()]
        candidates = {(trial.problem, trial.config) for trial in _trials(store)}
    return sorted(decisions, key=lambda decision: str(decision.problem)), candidates


def _trials(store: Store) -> list[Trial]:
    winner = store.winners()[0]
    return store.trials(winner.gpu, winner.toolchain)


def _wrong(folder: Path, planted: dict[Candidate, tuple[str, str]]) -> list[str]:
    wrong = []
    with sqlite3.connect(folder / "tune.db") as connection:
        said = connection.execute("PRAGMA integrity_check").fetchall()
        if said != [("ok",)]:
            wrong.append(f"the database is not whole: {said}")
    with Store.open(folder / "tune.db", readonly=True) as store:
        failures = [trial for trial in _trials(store) if trial.status != "correct"]
    statuses = {(trial.problem, trial.config): trial.status for trial in failures}
    for candidate, (place, fault) in planted.items():
        expected, got = STATUSES[place][fault], statuses.pop(candidate, "no failure")
        if got != expected:
            wrong.append(f"{place} fault {fault!r} of {candidate}: {got}, should be {expected}")
    wrong += [f"{each} is innocent and got {status}" for each, status in statuses.items()]
    if len(failures) > len(planted):
        wrong.append(f"{len(failures)} failures of {len(planted)} faults")
    wrong += [f"no reason for {trial.status}" for trial in failures if not trial.error]
    end = time.monotonic() + 10
    while _left(folder) and time.monotonic() < end:
        time.sleep(0.1)
    if _left(folder):
        wrong.append(f"processes left: {_left(folder)}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=Soak.kills)
    parser.add_argument("--faults", type=int, default=Soak.faults)
    parser.add_argument("--seed", type=int, default=SEED)
    asked = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(faults=asked.faults, kills=asked.kills, seed=asked.seed)
        wrong = run(soak, Path(folder))
    for line in wrong:
        print(f"wrong: {line}")
    print(f"{'failed' if wrong else 'passed'} in {time.monotonic() - started:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
