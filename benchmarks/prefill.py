"""Prefill beside SDPA (cuDNN, flash), FlexAttention, FlashAttention-3 and 4: one interleaved run.

The problems of benchmarks/workloads/prefill.yaml: 16384 tokens, 2048 / head_dim heads, bf16, causal
and full, lengths 512 to 16384; and causal grouped-query shapes of one sequence. Beside the exported
module stands the best config of the portable family: all its candidates are timed first, which
takes a while (`--no-portable` leaves it out).
"""

import argparse
import functools
import gc
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from harness import (
    arguments,
    case_result,
    geometric_mean,
    load_module,
    run_ahead,
    write_results,
)
from prefill_peers import PEERS, portable

from autoflash.accuracy import Budget, Verdict
from autoflash.bench import event_us
from autoflash.check import picked, sample_rows
from autoflash.config import Config
from autoflash.decision import paired_interval
from autoflash.export import export, write_module
from autoflash.families import FAMILIES, space
from autoflash.gpu import Gpu, detect
from autoflash.inputs import Inputs, make_inputs
from autoflash.peers import ours, peer_versions
from autoflash.peers.contender import Contender, Maker, told
from autoflash.problem import Problem
from autoflash.roofline import floor
from autoflash.store import Store, shipped_winners
from autoflash.store.overlay import overlay
from autoflash.turns import STEADY, Call, Times, buffer_sets, interleaved
from autoflash.workload import load_workload

WORKLOAD = Path(__file__).parent / "workloads" / "prefill.yaml"
WHOLE_SEQLEN = 2048  # longer outputs are judged by some of their rows
PORTABLE = FAMILIES["prefill"]
RACED = 4  # portable configs
RACE_US = 80_000.0  # of GPU time for each of them


def main() -> None:
    options = parsed()
    gpu = detect()
    if options.db and not options.module.is_file():
        export_module(options.db, options.module)
    problems = {name_of(p): p for p, _ in load_workload(options.workload).problems}
    problems = {name: p for name, p in problems.items() if options.cases in name}
    configs = {
        name: portable_configs(p, gpu) if options.portable else [] for name, p in problems.items()
    }
    started = time.monotonic()
    compile_ahead(problems, configs, options.module, gpu, options.processes)
    ahead_s = time.monotonic() - started
    done: dict[str, dict[str, Any]] = {}
    for name, result in measured_on(options.gpus, problems, configs, gpu, options):
        done[name] = result
        tell(result)
        results = [done[name] for name in problems if name in done]
        summary = summary_of(results)
        seconds = {"all": round(time.monotonic() - started), "compiling_ahead": round(ahead_s)}
        # after every case: whoever stops the run keeps what was done
        path = write_results("prefill", results, peer_versions(), summary=summary, seconds=seconds)
    for what, figures in summary.items():
        print(what, figures)
    print(path)


def measured_on(
    gpus: int,
    problems: Mapping[str, Problem],
    configs: Mapping[str, Sequence[Config]],
    gpu: Gpu,
    options: argparse.Namespace,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The result of each case as it is done; several GPUs take one case after another."""
    if gpus == 1:
        for name, problem in problems.items():
            yield measured(name, problem, configs[name], gpu, options.module, options.gpu_ms)
        return
    context = get_context("spawn")
    indices = context.Queue()
    for index in range(gpus):
        indices.put(index)
    with ProcessPoolExecutor(gpus, context, take_gpu, (indices,)) as pool:
        jobs = [
            pool.submit(measured, name, p, configs[name], gpu, options.module, options.gpu_ms)
            for name, p in problems.items()
        ]
        for job in as_completed(jobs):
            yield job.result()


def take_gpu(indices: Any) -> None:
    """Have this process use the next GPU that no other one has."""
    torch.cuda.set_device(indices.get())


loaded = functools.cache(load_module)


def measured(
    name: str, problem: Problem, configs: Sequence[Config], gpu: Gpu, module_path: Path, ms: float
) -> tuple[str, dict[str, Any]]:
    """One case: everyone who takes part in turn, `ms` of GPU time for each."""
    module = loaded(module_path)
    sets = buffer_sets(floor(problem, gpu).bytes_moved, gpu.l2_bytes)
    inputs = [make_inputs(problem, seed, "cuda") for seed in range(sets)]
    config = fastest(inputs, configs, gpu) if configs else None
    makers = makers_of(module, config, gpu)
    contenders, left_out, errors = admitted(name, inputs, makers)
    calls = {each: contender.calls for each, contender in contenders.items()}
    times = interleaved(calls, gpu_us=1e3 * ms, pace=STEADY)
    how = module.explain(contenders["autoflash"].calls[0])
    result = result_of(
        name,
        problem,
        gpu,
        times,
        left_out,
        errors_over_eager=errors,
        served={key: how[key] for key in ("how", "family", "knobs")},
        portable_config=config and {"candidates": len(configs), "knobs": config.as_dict()},
    )
    del inputs, contenders, calls
    gc.collect()
    torch.cuda.empty_cache()
    return name, result


def parsed() -> argparse.Namespace:
    parser = arguments(__doc__ or "")
    parser.add_argument("--workload", type=Path, default=WORKLOAD)
    parser.add_argument(
        "--db",
        type=Path,
        help="gives the module where there is no --module",
    )
    parser.add_argument(
        "--gpu-ms", type=float, default=700.0, help="of GPU time for a contender of a case"
    )
    parser.add_argument(
        "--no-portable", action="store_false", dest="portable", help="without the portable family"
    )
    parser.add_argument("--gpus", type=int, default=1, help="of this host that share the cases")
    parser.add_argument(
        "--processes", type=int, default=8, help="that compile ahead of the timing; 0 for none"
    )
    return parser.parse_args()


def name_of(problem: Problem) -> str:
    """A case in a few words: `128 causal 4096`, with grouped heads `128 causal 4096 32/8`."""
    p = problem
    heads = f" {p.num_heads}/{p.num_kv_heads}" if p.group_size > 1 else ""
    return f"{p.head_dim} {'causal' if p.causal else 'full'} {p.seqlen_q}{heads}"


def export_module(db: Path, path: Path) -> None:
    """Write the module of a database's winners over the shipped ones, as autoflash export does."""
    with Store.open(db, readonly=True) as store:
        winners = overlay(store.winners(), shipped_winners())
    write_module(export(winners), path)


def portable_configs(problem: Problem, gpu: Gpu) -> list[Config]:
    """Every candidate of the portable family."""
    return [config for config, refused in space(PORTABLE, problem, gpu) if refused is None]


def fastest(inputs: list[Inputs], configs: Sequence[Config], gpu: Gpu) -> Config:
    """The fastest of the configs on these inputs: each alone first, then the best in turn.

    The family's default where none can be launched: whoever launches that is told why.
    """
    calls = {config: portable(config, gpu, inputs).calls for config in configs}
    alone = {config: alone_us(of_config) for config, of_config in calls.items()}
    raced = sorted(configs, key=lambda config: (alone[config], config))[:RACED]
    if alone[raced[0]] == float("inf"):
        return PORTABLE.default(inputs[0].problem, gpu)
    times = interleaved({str(config): calls[config] for config in raced}, gpu_us=RACE_US)
    return min(raced, key=lambda config: times[str(config)].median_us)


def alone_us(calls: Sequence[Call]) -> float:
    """The best of three calls; infinite where a call fails."""
    try:
        calls[0]()
        return min(event_us(call) for call in (calls * 3)[:3])
    except Exception:  # a config that does not fit this GPU after all
        return float("inf")


def makers_of(module: Any, config: Config | None, gpu: Gpu) -> dict[str, Maker]:
    """Everyone who takes part, by name; the portable family with this config, if with any."""
    beside = {"portable": functools.partial(portable, config, gpu)} if config else {}
    return {"autoflash": functools.partial(ours.prefill, module), **beside, **PEERS}


def compile_ahead(
    problems: Mapping[str, Problem],
    configs: Mapping[str, Sequence[Config]],
    module: Path,
    gpu: Gpu,
    processes: int,
) -> None:
    """Have processes fill the caches on disk of what compiles for each shape, one call each."""
    seen: set[Hashable] = set()
    run_ahead(
        {
            f"{name}, {contender} {config or ''}".rstrip(): functools.partial(
                call_once, contender, problem, module, config, gpu
            )
            for name, problem in problems.items()
            for contender, config in (
                ("flex_attention", None),
                ("autoflash", None),
                *(("portable", config) for config in new_binaries(problem, configs[name], seen)),
            )
        },
        processes,
    )


def new_binaries(problem: Problem, configs: Sequence[Config], seen: set[Hashable]) -> list[Config]:
    """Configs whose kernels no earlier problem compiles; `seen` notes these."""
    new = {}
    for config in configs:
        compiled = (PORTABLE.variant(problem), problem.head_dim, problem.group_size)
        new.setdefault((*compiled, PORTABLE.binary(config)), config)
    new = {key: config for key, config in new.items() if key not in seen}
    seen.update(new)
    return list(new.values())


def call_once(
    contender: str, problem: Problem, module: Path, config: Config | None, gpu: Gpu
) -> None:
    """One call of a contender, for what it leaves in the caches on disk."""
    makers = makers_of(load_module(module), config, gpu)
    makers[contender]([make_inputs(problem, 0, "cuda")]).calls[0]()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # the other processes have cases of their own on the same card


def admitted(
    name: str, inputs: list[Inputs], makers: Mapping[str, Maker]
) -> tuple[dict[str, Contender], dict[str, str], dict[str, float]]:
    """Contenders whose output is right; why others are left out; errors over the eager one's.

    Raises SystemExit when it is autoflash that is left out.
    """
    judge = referee(inputs[0])
    contenders, left_out, errors = {}, {}, {}
    for contender, make in makers.items():
        try:
            made = make(inputs)
            verdict = judge(made.out())
        except Exception as error:  # a peer may raise anything: it is named with it
            left_out[contender] = told(error)
            continue
        errors[contender] = round(verdict.max_ratio, 3)
        if verdict.correct:
            contenders[contender] = made
        else:
            left_out[contender] = f"wrong: {verdict.reason}"
    if "autoflash" in left_out:
        raise SystemExit(f"error: {name}: autoflash: {left_out['autoflash']}")
    return contenders, left_out, errors


def referee(inputs: Inputs) -> Callable[[torch.Tensor], Verdict]:
    """Judges an output in the problem's layout by the error budget: whole, or some rows of it."""
    problem = inputs.problem
    if problem.seqlen_k <= WHOLE_SEQLEN:
        whole = Budget(inputs)
        return lambda out: whole.judge(out, None)
    rows = sample_rows(problem, seed=0)
    budget = Budget(inputs, rows=rows)

    def judge(out: torch.Tensor) -> Verdict:
        if not out.isfinite().all():
            return Verdict("out is not finite", 0.0, 0.0, 0.0)
        return budget.judge(picked(problem, out, None, rows)[0], None)

    return judge


def result_of(
    name: str,
    problem: Problem,
    gpu: Gpu,
    times: Mapping[str, Times],
    left_out: Mapping[str, str],
    **more: Any,
) -> dict[str, Any]:
    """One case of the results. The portable config is no peer: it stands beside FlexAttention.

    `ratio_interval` is that of the paired rounds of autoflash and the best peer, at 95 %.
    """
    medians = {each: one.median_us for each, one in times.items()}
    work = floor(problem, gpu)
    p = problem
    case = {
        "name": name,
        "batch": p.batch,
        "num_heads": p.num_heads,
        "num_kv_heads": p.num_kv_heads,
        "head_dim": p.head_dim,
        "seqlen": p.seqlen_q,
        "causal": p.causal,
    }
    peers = {each: one for each, one in times.items() if each not in ("autoflash", "portable")}
    best = min(peers, key=lambda each: medians[each], default=None)
    beside = None
    if best is not None:
        paired = paired_interval(times[best].samples_us, times["autoflash"].samples_us)
        beside = {"peer": best, "low": round(1 + paired.low, 4), "high": round(1 + paired.high, 4)}
    portable_us, flex_us = medians.get("portable"), medians.get("flex_attention")
    over_flex = round(flex_us / portable_us, 4) if portable_us and flex_us else None
    return case_result(
        case,
        {each: us for each, us in medians.items() if each != "portable"},
        left_out,
        ratio_interval=beside,
        portable=round(portable_us, 2) if portable_us else None,
        portable_over_flex=over_flex,
        tflops={each: round(work.tflops(us), 1) for each, us in medians.items()},
        spread_percent={each: round(one.spread_percent, 2) for each, one in times.items()},
        sm_clock_mhz={each: one.sm_clock_mhz for each, one in times.items()},
        regime={each: one.regime for each, one in times.items()},
        rounds=len(times["autoflash"].samples_us),
        **more,
    )


def tell(result: Mapping[str, Any]) -> None:
    """The case in one line."""
    rates = "  ".join(f"{each} {rate:.0f}" for each, rate in result["tflops"].items())
    how = result["served"]["how"]
    print(f"{result['case']['name']:22s} TFLOP/s {rates}  ratio {result['ratio']} ({how})")
    for peer, reason in result.get("unavailable", {}).items():
        print(f"    {peer} is left out: {reason}")
    sys.stdout.flush()


def summary_of(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Geometric mean and worst of autoflash over the best peer, on the grid and with grouped heads,
    and of the portable family over FlexAttention."""
    grid, grouped, over_flex = {}, {}, {}
    for result in results:
        case = result["case"]
        of_kind = grid if case["num_heads"] == case["num_kv_heads"] else grouped
        if result["ratio"]:
            of_kind[case["name"]] = result["ratio"]
        if result["portable_over_flex"]:
            over_flex[case["name"]] = result["portable_over_flex"]
    kinds = {"grid": grid, "grouped_heads": grouped, "portable_over_flex": over_flex}
    return {kind: _figures(ratios) for kind, ratios in kinds.items() if ratios}


def _figures(ratios: Mapping[str, float]) -> dict[str, Any]:
    worst = min(ratios, key=lambda name: ratios[name])
    return {
        "cases": len(ratios),
        "geometric_mean": round(geometric_mean(list(ratios.values())), 4),
        "worst": ratios[worst],
        "worst_case": worst,
    }


if __name__ == "__main__":
    main()
