"""What databases are filled with in tests: GPUs, toolchains, problems, configs, verdicts."""

from dataclasses import replace

from autoflash.config import Config
from autoflash.families import FAMILIES
from autoflash.gpu import Gpu, known
from autoflash.problem import Problem
from autoflash.records import Decision, ExportedProblem, Trial, Winner
from autoflash.store import Store
from autoflash.toolchain import Toolchain

H200 = known("NVIDIA_H200")
A100 = known("NVIDIA_A100_SXM4_80GB")
TOOLCHAIN = Toolchain(driver="575.1", cuda="12.8", torch="2.11.0", triton="3.6.0", ptxas="12.9")
OLDER = replace(TOOLCHAIN, triton="3.5.1")
PROBLEM = Problem("decode", "bf16", 1, 32, 8, 128, 1, 1024)


def config(place: int = 0, family: str = "decode") -> Config:
    """A config of the family; another place, another config."""
    knobs = {knob.name: knob.values[0] for knob in FAMILIES[family].knobs}
    return Config.of(family, knobs | {"num_warps": 2**place})


def trial(problem: Problem = PROBLEM, us: float | None = 7.5, place: int = 0, **fields) -> Trial:
    timed = {"status": "correct", "stage": "screen", "regime": "graph" if us else "none"}
    return Trial(problem, config(place), "d1", median_us=us, **(timed | fields))


def decision(problem: Problem = PROBLEM, us: float = 7.5, place: int = 0, **fields) -> Decision:
    return Decision(
        problem, "d1", config(place), us, config(3), 9.0, 9.0 / us - 1, 0.1, 0.3, **fields
    )


def winner(gpu: Gpu = H200, toolchain: Toolchain = TOOLCHAIN, **fields) -> Winner:
    return Winner(gpu, toolchain, decision(**fields), 1.0, "2026-01-02T03:04:05+00:00")


def exported(gpu: Gpu = H200, problem: Problem = PROBLEM, **fields) -> ExportedProblem:
    told = {"config": config(), "source": "measured", "regret": 0.02, "unseen_regret": 0.5}
    return ExportedProblem(gpu, TOOLCHAIN, problem, **told | fields)


def run(store: Store, gpu: Gpu = H200, toolchain: Toolchain = TOOLCHAIN) -> int:
    """A new run of the store."""
    return store.start_run(
        gpu, toolchain, seed=0, effort="quick", budget_s=None, argv=["tune"], protocol="graph"
    )
