"""prefill_hopper_lazy beside prefill_hopper with its knobs, cuDNN and FlashAttention-3: one run.

The problems of benchmarks/workloads/prefill.yaml whose shipped winner on this GPU is of
prefill_hopper. The lazy family has the winner's knobs, and some of them the other way.
"""

import argparse
import functools
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
from harness import case_result, geometric_mean, write_results
from prefill import WORKLOAD, admitted, name_of
from prefill_peers import portable

from autoflash.config import Config
from autoflash.families import why_refused
from autoflash.gpu import Gpu, detect
from autoflash.inputs import make_inputs
from autoflash.kernel import precompile
from autoflash.peers import peer_versions
from autoflash.peers.contender import Maker
from autoflash.peers.prefill import PEERS
from autoflash.problem import Problem
from autoflash.roofline import floor
from autoflash.store import shipped_winners
from autoflash.turns import Pace, Times, buffer_sets, interleaved
from autoflash.workload import load_workload

PLAIN, LAZY = "prefill_hopper", "prefill_hopper_lazy"
BESIDE = ("cudnn", "flash_attention_3")
PACE = Pace(30_000.0, 20_000.0)  # on a hot card, in half the time of the other benchmarks


def main() -> None:
    options = parsed()
    gpu = detect()
    winners = {
        each.decision.problem: each.decision.winner
        for each in shipped_winners()
        if each.gpu.identity == gpu.identity and each.decision.winner.family == PLAIN
    }
    problems = [problem for problem, _ in load_workload(WORKLOAD).problems if problem in winners]
    problems = [problem for problem in problems if options.cases in name_of(problem)]
    configs = {problem: configs_of(problem, winners[problem], gpu) for problem in problems}
    compile_ahead(configs, gpu, options.processes)
    results: list[dict[str, Any]] = []
    path = None
    for problem, of_problem in configs.items():
        results.append(measured(problem, of_problem, gpu, options.gpu_ms))
        print(results[-1], flush=True)
        # after every case: whoever stops the run keeps what was done
        path = write_results("lazy", results, peer_versions(), summary=summary_of(results))
    print(summary_of(results))
    print(path)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default="", help="only cases whose text contains this")
    parser.add_argument(
        "--gpu-ms", type=float, default=250.0, help="of GPU time for a contender of a case"
    )
    parser.add_argument("--processes", type=int, default=14, help="that compile ahead")
    return parser.parse_args()


def configs_of(problem: Problem, winner: Config, gpu: Gpu) -> dict[str, Config]:
    """The winner, and the lazy family with its knobs; those that are candidates, each once."""
    knobs = winner.as_dict()
    turned = {"lazy": {}, "lazy, other turns": {"PING_PONG": 1 - int(knobs["PING_PONG"])}}
    if problem.head_dim == 128:
        turned["lazy, q elsewhere"] = {"Q_IN_REGISTERS": 1 - int(knobs["Q_IN_REGISTERS"])}
    lazy = {name: Config.of(LAZY, {**knobs, **changes}) for name, changes in turned.items()}
    valid = {name: c for name, c in lazy.items() if why_refused(problem, c, gpu) is None}
    return {"plain": winner, **valid}


def compile_ahead(
    configs: Mapping[Problem, Mapping[str, Config]], gpu: Gpu, processes: int
) -> None:
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for problem, of_problem in configs.items():
            for config in of_problem.values():
                pool.submit(precompile, problem, config, gpu, False)


def measured(
    problem: Problem, configs: Mapping[str, Config], gpu: Gpu, ms: float
) -> dict[str, Any]:
    """One case: everyone who is right in turn, `ms` of GPU time for each."""
    sets = buffer_sets(floor(problem, gpu).bytes_moved, gpu.l2_bytes)
    inputs = [make_inputs(problem, seed, "cuda") for seed in range(sets)]
    makers: dict[str, Maker] = {
        name: functools.partial(portable, config, gpu) for name, config in configs.items()
    }
    makers |= {name: PEERS[name] for name in BESIDE}
    contenders, left_out, _ = admitted(name_of(problem), inputs, makers)
    calls = {name: contender.calls for name, contender in contenders.items()}
    times = interleaved(calls, gpu_us=1e3 * ms, pace=PACE)
    del inputs, contenders, calls
    torch.cuda.empty_cache()
    return result_of(problem, gpu, times, left_out)


def result_of(
    problem: Problem, gpu: Gpu, times: Mapping[str, Times], left_out: Mapping[str, str]
) -> dict[str, Any]:
    """One case of the results: ours is the fastest of both families."""
    medians = {name: one.median_us for name, one in times.items()}
    ours = {name: us for name, us in medians.items() if name not in BESIDE}
    peers = {name: us for name, us in medians.items() if name in BESIDE}
    work = floor(problem, gpu)
    return case_result(
        {"name": name_of(problem)},
        {"autoflash": min(ours.values()), **peers},
        left_out,
        tflops={name: round(work.tflops(us), 1) for name, us in medians.items()},
        lazy_over_plain=round(ours["plain"] / ours["lazy"], 4) if "lazy" in ours else None,
    )


def summary_of(results: list[dict[str, Any]]) -> dict[str, float]:
    """Geometric means: of the better family over the better peer, of lazy over plain."""
    kinds = {key: [r[key] for r in results if r[key]] for key in ("ratio", "lazy_over_plain")}
    return {key: round(geometric_mean(of_kind), 4) for key, of_kind in kinds.items() if of_kind}


if __name__ == "__main__":
    sys.exit(main())
