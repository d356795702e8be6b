"""How good the search is: replayed on a recorded table, or against exhaustive search on a GPU.

    python benchmarks/tuning.py replay              # no GPU: strategies on tests/data
    python benchmarks/tuning.py record --out FILE   # times of every candidate, as such a table
    python benchmarks/tuning.py compare             # --effort standard beside exhaustive search

`compare` times what both searches chose, the default and the exhaustive search's finalists once
more, side by side, and writes benchmarks/results/tuning-<GPU>.json: `seconds` of either search, and
the chosen configs' times over the best of that table.
"""

import argparse
import random
import tempfile
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import mean, median

from harness import case_result, geometric_mean, write_results

from autoflash.config import Config
from autoflash.gpu import DEFAULT_TARGET, known
from autoflash.model import predicted_us
from autoflash.problem import Problem, title
from autoflash.promise import by_promise
from autoflash.records import Decision, Resources
from autoflash.search.recorded import Recorded, read_table, recorded_from, write_table
from autoflash.search.replay import (
    compared,
    default_first,
    rank_correlation,
    slowest_first,
)
from autoflash.store import Store
from autoflash.tune import PROTOCOL, TuneResult, tune
from autoflash.worker import Deadlines, Worker
from autoflash.workload import Workload

TABLE = Path(__file__).parents[1] / "tests" / "data" / "recorded-NVIDIA_H200.jsonl"
TRIALS = (8, 16, 24, 32)
SEEDS = range(10)
ROUNDS = 31  # of the re-timed table
ROUND_US = 100_000.0  # of GPU time, at most, for one config in one round
RETIMED = 10  # of the exhaustive search's finalists


def prefill(batch: int, seqlen: int, causal: bool = False, head_dim: int = 128) -> Problem:
    return Problem("prefill", "bf16", batch, 32, 8, head_dim, seqlen, seqlen, causal=causal)


def decode(batch: int, seqlen: int, page_size: int, num_heads: int = 32) -> Problem:
    return Problem("decode", "bf16", batch, num_heads, 8, 128, 1, seqlen, page_size=page_size)


PROBLEMS = {
    "prefill-4x512": prefill(4, 512),
    "prefill-1x2048-causal": prefill(1, 2048, causal=True),
    "prefill-1x4096": prefill(1, 4096),
    "prefill-4x4096-causal": prefill(4, 4096, causal=True),
    "prefill-2x8192-causal": prefill(2, 8192, causal=True),
    "prefill-4x4096-d64": prefill(4, 4096, head_dim=64),
    "decode-1x8192-paged": decode(1, 8192, 16),
    "decode-1x32768": decode(1, 32768, 0),
    "decode-8x8192-paged": decode(8, 8192, 16),
    "decode-64x4096": decode(64, 4096, 0),
    "decode-64x4096-paged": decode(64, 4096, 16),
    "decode-16x16384-paged-64h": decode(16, 16384, 16, num_heads=64),
}


def replay_table(table: Path) -> None:
    """How often the strategies come near the best of the table, by trials."""
    recorded = read_table(table)
    print(f"{len(recorded)} problems, {len(SEEDS)} seeds")
    print(f"{'order':8} {'strategy':12} {'trials':>6} {'1 %':>6} {'5 %':>6} {'worst':>6}")
    for told, order in ORDERS.items():
        for name in ("random", "promising", "hill_climb"):
            for row in compared(recorded, name, TRIALS, SEEDS, order):
                print(
                    f"{told:8} {name:12} {row.trials:6} {row.within_1_percent:6.3f} "
                    f"{row.within_5_percent:6.3f} {row.worst:6.3f}"
                )
    for op in ("prefill", "decode"):
        for told in ("compiled", "guessed"):
            found = [
                _rank_correlation(r, told == "compiled") for r in recorded if r.problem.op == op
            ]
            print(
                f"rank correlation of predicted and measured times, {op}, resources {told}: "
                f"mean {mean(found):.2f}, {min(found):.2f} to {max(found):.2f}"
            )


def _by_promise(recorded: Recorded) -> list[Config]:
    """As a search orders candidates before anything is compiled."""
    return by_promise(default_first(recorded), recorded.problem, known(DEFAULT_TARGET), [], {}, {})


ORDERS = {"default": default_first, "promise": _by_promise, "slowest": slowest_first}


def _rank_correlation(recorded: Recorded, compiled: bool) -> float:
    """Of the model's figures with one problem's recorded times."""
    gpu, unknown = known(DEFAULT_TARGET), Resources()
    predicted = [
        predicted_us(recorded.problem, config, timed.resources if compiled else unknown, gpu)
        for config, timed in recorded.timed.items()
    ]
    return rank_correlation(predicted, [timed.median_us for timed in recorded.timed.values()])


def record(problems: dict[str, Problem], out: Path, seed: int) -> None:
    """Search exhaustively with the most effort and keep every time as a table."""
    with tempfile.TemporaryDirectory() as folder:
        result = _tune(problems, Path(folder) / "record.db", "max", "exhaustive", seed)
        with Store.open(result.db, readonly=True) as store:
            trials = store.trials(result.gpu, result.toolchain)
    recorded = recorded_from(trials, {d.problem: d for d in result.decisions})
    chain = result.toolchain
    provenance = {
        "gpu": result.gpu.name,
        "driver": chain.driver,
        "torch": chain.torch,
        "triton": chain.triton,
        "commands": ["python benchmarks/tuning.py record"],
        "effort": "max",
        "seed": seed,
        "protocol": PROTOCOL,
    }
    write_table(out, recorded, provenance)
    print(f"{out}: {len(recorded)} of {len(problems)} problems")


def compare(problems: dict[str, Problem], seed: int) -> None:
    """Standard effort beside exhaustive search, judged by one re-timed table."""
    with tempfile.TemporaryDirectory() as folder:
        standard = _tune(problems, Path(folder) / "standard.db", "standard", "auto", seed)
        most = _tune(problems, Path(folder) / "exhaustive.db", "max", "exhaustive", seed)
    chosen = {decision.problem: decision for decision in standard.decisions}
    exhaustive = {decision.problem: decision for decision in most.decisions}
    cases, losses = [], []
    for name, problem in problems.items():
        if problem not in chosen or problem not in exhaustive:
            raise SystemExit(f"error: no winner for {name}")
        winner, best = chosen[problem].winner, exhaustive[problem].winner
        times = retimed(problem, _contenders(chosen[problem], exhaustive[problem]), seed)
        losses.append(times[winner] / min(times.values()))
        case = {"name": name, "problem": title(problem)}
        ours = {"autoflash": times[winner], "exhaustive": times[best]}
        cases.append(case_result(case, ours, {}, over_best=round(losses[-1], 4)))
        print(f"{name:28} {times[winner]:9.2f} us, {losses[-1]:.4f} of the best")
    path = write_results(
        "tuning",
        cases,
        seconds={"standard": round(standard.seconds, 1), "exhaustive": round(most.seconds, 1)},
        trials={"standard": standard.trials, "exhaustive": most.trials},
        gpu_busy={"standard": _gpu_busy(standard), "exhaustive": _gpu_busy(most)},
        geomean_over_exhaustive=round(geometric_mean(losses), 4),
        worst_over_exhaustive=round(max(losses), 4),
    )
    print(f"{path}: geomean {geometric_mean(losses):.4f}, worst {max(losses):.4f}")


def retimed(problem: Problem, configs: Sequence[Config], seed: int) -> dict[Config, float]:
    """Median microseconds of each config, all in turn, in random order every round."""
    from autoflash.trial import CudaDevice

    samples: dict[Config, list[float]] = {config: [] for config in configs}
    order = random.Random(seed)
    with closing(Worker(partial(CudaDevice, 0), Deadlines())) as worker:
        worker.prepare(problem, seed)
        for config in configs:
            worker.arm(config, ROUND_US)
        for _ in range(ROUNDS):
            row = {c: worker.sample(c) for c in order.sample(list(configs), len(configs))}
            if not any(braked for _, braked in row.values()):
                for config, (us, _) in row.items():
                    samples[config].append(us)
        worker.disarm()
    return {config: median(taken) for config, taken in samples.items()}


def _gpu_busy(result: TuneResult) -> float | None:
    return round(result.busy.gpus, 3) if result.busy else None


def _contenders(standard: Decision, exhaustive: Decision) -> list[Config]:
    finalists = [config for config, _ in exhaustive.times[:RETIMED]]
    wanted = [standard.winner, exhaustive.winner, standard.default, *finalists]
    return list(dict.fromkeys(wanted))


def _tune(
    problems: dict[str, Problem], db: Path, effort: str, strategy: str, seed: int
) -> TuneResult:
    workload = Workload("tuning", tuple((problem, 1.0) for problem in problems.values()))
    return tune(workload, db=db, effort=effort, strategy=strategy, seed=seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=("replay", "record", "compare"))
    parser.add_argument("--table", type=Path, default=TABLE, help="what replay reads")
    parser.add_argument("--out", type=Path, default=Path("recorded.jsonl"), help="of record")
    parser.add_argument("--cases", default="", help="only problems whose name contains this")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    problems = {name: p for name, p in PROBLEMS.items() if given.cases in name}
    if given.what == "replay":
        replay_table(given.table)
    elif given.what == "record":
        record(problems, given.out, given.seed)
    else:
        compare(problems, given.seed)


if __name__ == "__main__":
    main()
