"""Tune on a real GPU: faults of every kind planted among the candidates, memory, the parent."""

import os
import subprocess
import sys
from contextlib import closing
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from planted_device import HELD_BYTES, CompilerlessDevice, PlantedDevice

from autoflash.child import Child, Failure
from autoflash.effort import EFFORTS
from autoflash.families import family_of
from autoflash.gpu import detect
from autoflash.groups import groups_of
from autoflash.pool import CompilePool, TritonCompiler
from autoflash.problem import Problem
from autoflash.search.random import random
from autoflash.store import Store
from autoflash.tune import Machine, tune
from autoflash.worker import Deadlines
from autoflash.workload import Workload

pytestmark = pytest.mark.gpu

PROBLEM = Problem("prefill", "bf16", 1, 4, 4, 128, 512, 512)  # case B01
DECODE = Problem("decode", "bf16", 4, 8, 2, 128, 1, 2048, page_size=16)
QUICK = EFFORTS["quick"].max_candidates
FAULTS = {
    "out_of_bounds": "runtime",
    "hang": "timeout",
    "abort": "runtime",
    "raise": "runtime",
    "compile": "compile",
    "wrong": "correctness",
    "unrepeatable": "correctness",
    "trespass": "correctness",
    "killed": "runtime",
    "gpu memory": "runtime",
}


def tried(problem, gpu):
    """The candidates a quick search tries, the default first."""
    (group,), _ = groups_of([problem], gpu)
    return next(random(group.candidates(problem, gpu), QUICK, 0))


def distinct(configs):
    """The first config of each binary: what they do wrong is then their own."""
    kept = {family_of(c.family).binary(c): c for c in reversed(configs)}
    return list(kept.values())[::-1]


@cache
def found_right(problem):
    """Configs that a search finds right, the default first and one of each binary."""
    with TemporaryDirectory() as folder:
        result = search(problem, Path(folder) / "clean.db", {})
        with Store.open(result.db, readonly=True) as store:
            trials = store.trials(result.gpu, result.toolchain, problem)
    right = {trial.config for trial in trials if trial.status == "correct"}
    return [config for config in distinct(tried(problem, detect())) if config in right]


def machine(faults):
    deadlines = Deadlines(check_s=20.0, time_s=20.0)
    return Machine(partial(PlantedDevice, faults), TritonCompiler, deadlines)


def search(problem, db, faults):
    workload = Workload("test", ((problem, 1.0),))
    return tune(workload, db=db, effort="quick", strategy="random", machine=machine(faults))


@pytest.mark.parametrize("problem", [PROBLEM, DECODE])
def test_planted_faults_cost_one_trial_each_and_the_search_ends(problem, tmp_path):  # case B01
    torch.zeros(1, device="cuda")  # case B30: a parent that uses CUDA is no hindrance
    _, *others = found_right(problem)
    faults = dict(zip(others, FAULTS, strict=False))
    assert len(faults) == len(FAULTS)
    result = search(problem, tmp_path / "tune.db", faults)
    (decision,) = result.decisions
    assert decision.winner not in faults and decision.winner_us > 0
    with Store.open(result.db, readonly=True) as store:
        trials = store.trials(result.gpu, result.toolchain, problem)
    failures = [trial for trial in trials if trial.config in faults]
    assert {trial.config: trial.status for trial in failures} == {
        config: FAULTS[fault] for config, fault in faults.items()
    }
    assert len(failures) == len(FAULTS) and all(trial.error for trial in failures)
    assert 0 < result.busy.gpus <= result.busy.processes <= 1
    assert torch.ones(8, device="cuda").sum().item() == 8  # the parent's context is whole


def test_a_wrong_default_is_rejected_and_another_wins(tmp_path):  # case B28
    default = tried(PROBLEM, detect())[0]
    (decision,) = search(PROBLEM, tmp_path / "tune.db", {default: "wrong"}).decisions
    assert decision.default == default != decision.winner and decision.default_us == 0.0


def test_a_candidate_made_slow_does_not_win(tmp_path):
    first = search(PROBLEM, tmp_path / "one.db", {}).decisions[0]
    slowed = search(PROBLEM, tmp_path / "other.db", {first.winner: "slow"}).decisions[0]
    assert slowed.winner != first.winner
    assert first.margin_low >= 0 and slowed.margin_low >= 0


def test_fifty_failing_candidates_leave_the_memory_as_it_was():  # case S07
    config = tried(PROBLEM, detect())[0]
    child = Child(partial(PlantedDevice, {config: "raise"}))
    before = child.call("allocated_bytes", deadline_s=60)
    for _ in range(50):
        with pytest.raises(Failure, match=f"{HELD_BYTES} bytes held"):
            child.call("check", PROBLEM, config, 0, deadline_s=60)
    after = child.call("allocated_bytes", deadline_s=60)
    starts = child.starts
    child.close()
    assert starts == 1 and after - before < HELD_BYTES


def test_buffers_of_one_problem_are_gone_when_the_next_is_prepared():
    child = Child(partial(PlantedDevice, {}))
    child.call("prepare", PROBLEM, 0, deadline_s=120)
    held = child.call("allocated_bytes", deadline_s=60)
    assert held > 2 * detect().l2_bytes  # cold caches: more than twice the L2 in rotation
    child.call("prepare", DECODE, 0, deadline_s=120)
    child.call("prepare", PROBLEM, 0, deadline_s=120)
    assert child.call("allocated_bytes", deadline_s=60) <= held * 1.01
    child.close()


def test_a_search_leaves_cuda_alone_in_its_own_process(tmp_path):  # case B30
    script = (
        "from pathlib import Path\n"
        "import torch\n"
        "from autoflash.tune import tune\n"
        "from autoflash.workload import Workload\n"
        "from autoflash.problem import Problem\n"
        f"workload = Workload('test', (({PROBLEM!r}, 1.0),))\n"
        f"result = tune(workload, db=Path({str(tmp_path / 'tune.db')!r}), effort='quick')\n"
        "assert len(result.decisions) == 1\n"
        "assert result.decisions[0].source == 'measured'\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=300)


def test_a_first_launch_after_the_pool_runs_no_compiler(tmp_path, monkeypatch):
    gpu = detect()
    environment = {"TRITON_CACHE_DIR": str(tmp_path)}
    configs = [tried(DECODE, gpu)[0], tried(PROBLEM, gpu)[0]]
    with closing(CompilePool(TritonCompiler, 2, environment=environment)) as pool:
        pairs = list(zip((DECODE, PROBLEM), configs, strict=True))
        for future in [pool.submit([problem], config, gpu) for problem, config in pairs]:
            future.result()
    child = Child(partial(CompilerlessDevice, {}), environment)
    for problem, config in pairs:
        child.call("check", problem, config, 0, deadline_s=120)
        child.call("prepare", problem, 0, deadline_s=120)
        child.call("check_full", config, 0, deadline_s=120)
        child.call("screen", config, 3, 1e5, 1e9, deadline_s=120)
    child.close()
