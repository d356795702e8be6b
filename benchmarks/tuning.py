"""How good the search is: replayed on a recorded table, or against exhaustive search on a GPU.

    python benchmarks/tuning.py replay              # no GPU: strategies on tests/data
    python benchmarks/tuning.py compare             # --effort standard beside exhaustive search
    python benchmarks/tuning.py compare --record FILE   # its times as a table for replays, too
    python benchmarks/tuning.py seeds               # three searches with other seeds

`compare` times what both searches chose, the default and the exhaustive search's finalists once
more, side by side, and writes benchmarks/results/tuning-<GPU>.json: `seconds` of either search, and
the chosen configs' times over the best of that table. The best is the fastest of every second
round, the ratio that of the others, so that luck in being the fastest counts for nothing.
`seeds` writes tuning_seeds-<GPU>.json: on which problems all searches have one winner or a tie, by
a final of theirs or by one of their winners, as long as that of `compare`.
"""

import argparse
import os
import random
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import starmap
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, median

from harness import case_result, geometric_mean, write_results

from autoflash.bench import Pace
from autoflash.cards import open_card
from autoflash.check import Stage
from autoflash.config import Config
from autoflash.decision import Interval, is_tie, paired_interval
from autoflash.effort import EFFORTS
from autoflash.gpu import DEFAULT_TARGET, Gpu, known
from autoflash.model import predicted_us
from autoflash.pool import CompilePool, TritonCompiler, Urgency
from autoflash.problem import Problem, title
from autoflash.promise import by_promise
from autoflash.records import Decision, Resources
from autoflash.rounds import Samples, pace_of_final
from autoflash.scratch import scratch_cache
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
LIVE_SEEDS = range(3)
ROUNDS, LED_ROUNDS = 62, 20  # of the re-timed table
RETIMED = 10  # of the exhaustive search's finalists
# Every candidate, and the finalists for long; other shapes' finalists are candidates anyway.
EXHAUSTIVE = replace(
    EFFORTS["max"], name="exhaustive", rungs=(5, 16, 64), prolonged_s=5.0, cross_rounds=0
)


def prefill(batch: int, seqlen: int, causal: bool = False, head_dim: int = 128) -> Problem:
    return Problem("prefill", "bf16", batch, 32, 8, head_dim, seqlen, seqlen, causal=causal)


def decode(batch: int, seqlen: int, page_size: int, num_heads: int = 32) -> Problem:
    return Problem("decode", "bf16", batch, num_heads, 8, 128, 1, seqlen, page_size=page_size)


PROBLEMS = {
    "prefill-4x512": prefill(4, 512),
    "prefill-1x2048-causal": prefill(1, 2048, causal=True),
    "prefill-1x4096": prefill(1, 4096),
    "prefill-4x4096-causal": prefill(4, 4096, causal=True),
    "prefill-1x8192-causal": prefill(1, 8192, causal=True),
    "prefill-4x2048-d64": prefill(4, 2048, head_dim=64),
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


def record(result: TuneResult, out: Path) -> None:
    """Keep every time of an exhaustive search as a table."""
    with Store.open(result.db, readonly=True) as store:
        trials = store.trials(result.gpu, result.toolchain)
    recorded = recorded_from(trials, {d.problem: d for d in result.decisions})
    chain = result.toolchain
    provenance = {
        "gpu": result.gpu.name,
        "driver": chain.driver,
        "torch": chain.torch,
        "triton": chain.triton,
        "commands": [f"python benchmarks/tuning.py compare --record {out.name}"],
        "date": datetime.now(UTC).date().isoformat(),
        "effort": EXHAUSTIVE.name,
        "protocol": PROTOCOL,
    }
    write_table(out, recorded, provenance)
    print(f"{out}: {len(recorded)} of {len(result.decisions)} problems")


def compare(problems: Mapping[str, Problem], seed: int, table: Path | None) -> None:
    """Standard effort beside exhaustive search, judged by one re-timed table."""
    with tempfile.TemporaryDirectory() as folder:
        standard = _tune(problems, Path(folder) / "standard.db", "standard", "auto", seed)
        most = _tune(problems, Path(folder) / "most.db", EXHAUSTIVE.name, "exhaustive", seed)
        if table:
            record(most, table)
    chosen = {decision.problem: decision for decision in standard.decisions}
    exhaustive = {decision.problem: decision for decision in most.decisions}
    if missing := [name for name, p in problems.items() if p not in chosen or p not in exhaustive]:
        raise SystemExit(f"error: no winner for {', '.join(missing)}")
    contenders = {p: _contenders(chosen[p], exhaustive[p]) for p in problems.values()}
    samples = retimed(contenders, most.gpu, seed)
    cases, losses = [], []
    for name, problem in problems.items():
        winner, best = chosen[problem].winner, exhaustive[problem].winner
        times = {config: median(taken) for config, taken in samples[problem].items()}
        losses.append(over_best(samples[problem], winner))
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


def over_best(samples: Samples, chosen: Config) -> float:
    """The chosen config's time over the best's, which is found in other rounds than these."""
    best = min(samples, key=lambda config: (median(samples[config][::2]), config))
    return 1 + paired_interval(samples[chosen][1::2], samples[best][1::2]).value


def retimed(
    contenders: Mapping[Problem, Sequence[Config]], gpu: Gpu, seed: int
) -> dict[Problem, Samples]:
    """Samples of each problem's configs, all in turn, in random order every round."""
    compiler = partial(TritonCompiler, with_cases=False)
    with (
        scratch_cache(lambda: True) as scratch,
        closing(CompilePool(compiler, environment=scratch)) as pool,
        closing(Worker(partial(open_card, 0), Deadlines(), environment=scratch)) as worker,
    ):
        asked = [
            pool.submit([p], config, gpu, Urgency.NOW, Stage.SCREEN)
            for p, cs in contenders.items()
            for config in cs
        ]
        for future in asked:
            future.result()
        return {
            problem: _in_turn(worker, problem, configs, gpu, seed)
            for problem, configs in contenders.items()
        }


def _in_turn(
    worker: Worker, problem: Problem, configs: Sequence[Config], gpu: Gpu, seed: int
) -> Samples:
    """At the pace of a final: long products are led."""
    samples: Samples = {config: [] for config in configs}
    order = random.Random(seed)
    worker.prepare(problem, seed)
    for config in configs:
        worker.arm(config, Pace(0.0, EXHAUSTIVE.sample_cap_us))
    ((taken, _),) = worker.sample([configs])
    _, pace = pace_of_final(problem, min(taken), gpu, EXHAUSTIVE)
    for config in configs if pace.lead_us else ():
        worker.arm(config, pace)
    for _ in range(LED_ROUNDS if pace.lead_us else ROUNDS):
        row = order.sample(list(configs), len(configs))
        ((taken, braked),) = worker.sample([row])
        for config, us in () if braked else zip(row, taken, strict=True):
            samples[config].append(us)
    worker.disarm()
    return samples


def seeds(problems: Mapping[str, Problem], gpus: int) -> None:
    """Searches from nothing with other seeds: on which problems they agree."""
    with tempfile.TemporaryDirectory() as folder:
        each = [(problems, Path(folder) / f"{n}.db", n, n % gpus, gpus) for n in LIVE_SEEDS]
        if gpus == 1:
            results = list(starmap(_tune_apart, each))
        else:
            with get_context("spawn").Pool(gpus) as pool:
                results = pool.starmap(_tune_apart, each)
    found = {
        p: [d for r in results for d in r.decisions if d.problem == p] for p in problems.values()
    }
    differing = {
        problem: list(dict.fromkeys(decision.winner for decision in decisions))
        for problem, decisions in found.items()
        if decisions and not all(map(partial(tied, decisions[0]), decisions))
    }
    beside = retimed(differing, results[0].gpu, max(LIVE_SEEDS)) if differing else {}
    cases, agreeing = [], 0
    for name, problem in problems.items():
        slower = slower_than_fastest(beside[problem]) if problem in beside else []
        agree = len(found[problem]) == len(results) and all(map(is_tie, slower))
        agreeing += agree
        case = {"name": name, "problem": title(problem)}
        winners = [str(decision.winner) for decision in found[problem]]
        over = [round(1 + interval.value, 4) for interval in slower]
        cases.append({"case": case, "agree": agree, "winners": winners, "retimed": over})
        print(f"{name:28} {'agree' if agree else 'differ'} {over or ''}")
    share = round(agreeing / len(problems), 4)
    seconds = [round(result.seconds, 1) for result in results]
    path = write_results("tuning_seeds", cases, seconds=seconds, agreeing=share)
    print(f"{path}: {agreeing} of {len(problems)} agree")


def slower_than_fastest(samples: Samples) -> list[Interval]:
    """Each config's time over that of the fastest, itself left out."""
    fastest = min(samples, key=lambda config: (median(samples[config]), config))
    return [
        paired_interval(taken, samples[fastest])
        for config, taken in samples.items()
        if config != fastest
    ]


def tied(one: Decision, other: Decision) -> bool:
    """Whether they have one winner, or either's is tied with the other's."""
    return other.winner in (one.winner, *one.tied) or one.winner in other.tied


def _gpu_busy(result: TuneResult) -> float | None:
    return round(result.busy.gpus, 3) if result.busy else None


def _contenders(standard: Decision, exhaustive: Decision) -> list[Config]:
    finalists = [config for config, _ in exhaustive.times[:RETIMED]]
    wanted = [standard.winner, exhaustive.winner, standard.default, *finalists]
    return list(dict.fromkeys(wanted))


def _tune(
    problems: Mapping[str, Problem],
    db: Path,
    effort: str,
    strategy: str,
    seed: int,
    gpu: int = 0,
    **more: bool,
) -> TuneResult:
    workload = Workload("tuning", tuple((problem, 1.0) for problem in problems.values()))
    asked = {"effort": effort, "strategy": strategy, "seed": seed, **more}
    return tune(workload, db=db, gpu_index=gpu, **asked)


def _tune_apart(
    problems: Mapping[str, Problem], db: Path, seed: int, gpu: int, gpus: int
) -> TuneResult:
    """A search on one of several GPUs, with its share of the cores.

    What it compiles is left to the next one: of interest is what is chosen.
    """
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[gpu::gpus])
    last = seed == max(LIVE_SEEDS)
    return _tune(problems, db, "standard", "auto", seed, gpu, keep_kernels=not last)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=("replay", "compare", "seeds"))
    parser.add_argument("--table", type=Path, default=TABLE, help="what replay reads")
    parser.add_argument("--record", type=Path, help="of compare: also a table for replays")
    parser.add_argument("--cases", default="", help="only problems whose name contains this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gpus", type=int, default=1, help="of seeds: as many searches at once")
    given = parser.parse_args()
    EFFORTS[EXHAUSTIVE.name] = EXHAUSTIVE  # in this process alone, and not for who imports this
    problems = {name: p for name, p in PROBLEMS.items() if given.cases in name}
    if given.what == "replay":
        replay_table(given.table)
    elif given.what == "compare":
        compare(problems, given.seed, given.record)
    else:
        seeds(problems, given.gpus)


if __name__ == "__main__":
    main()
