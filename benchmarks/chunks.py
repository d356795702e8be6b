"""Chunks of prompts over pages beside vLLM's FlashAttention-3, and beside keys that lie in order.

The problems of benchmarks/workloads/chunks.yaml. Where there is no --module, the workload is tuned
first and one exported. Each case stands beside the same queries and keys without pages too, packed
one after the other and served by the same module.
"""

import argparse
import functools
import gc
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from chunk_peers import flash_attention_3, in_order
from harness import arguments, case_result, geometric_mean, load_module, tune, write_results
from prefill import admitted, export_module

from autoflash.decision import paired_interval
from autoflash.gpu import Gpu, detect
from autoflash.inputs import lengths_of, make_inputs
from autoflash.peers import ours, peer_versions
from autoflash.peers.contender import Maker
from autoflash.problem import Problem, title
from autoflash.roofline import floor
from autoflash.turns import STEADY, Times, buffer_sets, interleaved
from autoflash.workload import load_workload

WORKLOAD = Path(__file__).parent / "workloads" / "chunks.yaml"


def main() -> None:
    options = parsed()
    gpu = detect()
    if not options.module.is_file():
        tune(options.workload, options.db, options.effort)
        export_module(options.db, options.module)
    module = load_module(options.module)
    results: list[dict[str, Any]] = []
    path = None
    for problem, _ in load_workload(options.workload).problems:
        if options.cases in title(problem):
            results.append(measured(problem, module, gpu, options.gpu_ms))
            tell(results[-1])
            # after every case: whoever stops the run keeps what was done
            summary = summary_of(results)
            path = write_results("chunks", results, peer_versions(), summary=summary)
    for what, figures in summary_of(results).items():
        print(what, figures)
    print(path)


def parsed() -> argparse.Namespace:
    parser = arguments(__doc__ or "")
    parser.add_argument("--workload", type=Path, default=WORKLOAD)
    parser.add_argument("--db", type=Path, default=Path("chunks.db"), help="to tune into")
    parser.add_argument("--effort", default="quick", help="of tuning, where there is no module")
    parser.add_argument(
        "--gpu-ms", type=float, default=400.0, help="of GPU time for a contender of a case"
    )
    return parser.parse_args()


def measured(problem: Problem, module: Any, gpu: Gpu, ms: float) -> dict[str, Any]:
    """One case: ours, FlashAttention-3's and ours of keys in order in turn, `ms` for each."""
    sets = buffer_sets(floor(problem, gpu).bytes_moved, gpu.l2_bytes)
    lengths = lengths_of(problem)
    inputs = [make_inputs(problem, seed, "cuda", lengths, poison=False) for seed in range(sets)]
    makers: dict[str, Maker] = {
        "autoflash": functools.partial(ours.prefill, module),
        "flash_attention_3": flash_attention_3,
    }
    contenders, left_out, errors = admitted(title(problem), inputs, makers)
    calls = {each: contender.calls for each, contender in contenders.items()}
    how = module.explain(calls["autoflash"][0])
    calls["in_order"] = in_order(module, inputs).calls
    calls["in_order"][0]()
    times = interleaved(calls, gpu_us=1e3 * ms, pace=STEADY)
    tflops = floor(problem, gpu).tflops(times["autoflash"].median_us)
    result = result_of(
        problem,
        times,
        left_out,
        tflops=round(tflops, 1),
        errors_over_eager=errors,
        served={key: how[key] for key in ("how", "family", "knobs")},
    )
    del inputs, contenders, calls
    gc.collect()
    torch.cuda.empty_cache()
    return result


def result_of(
    problem: Problem, times: Mapping[str, Times], left_out: Mapping[str, str], **more: Any
) -> dict[str, Any]:
    """One case of the results. Keys in order are no peer: over_in_order is their time over ours."""
    p = problem
    names = ("batch", "num_heads", "num_kv_heads", "head_dim", "seqlen_q", "seqlen_k", "causal")
    names += ("page_size", "layout", "lengths", "window_left")
    case = {"name": title(p), **{name: getattr(p, name) for name in names}}
    medians = {each: one.median_us for each, one in times.items()}
    in_order_us = medians.pop("in_order")
    beside = None
    if "flash_attention_3" in times:
        pairs = (times["flash_attention_3"].samples_us, times["autoflash"].samples_us)
        paired = paired_interval(*pairs)
        beside = {"low": round(1 + paired.low, 4), "high": round(1 + paired.high, 4)}
    return case_result(
        case,
        medians,
        left_out,
        ratio_interval=beside,
        in_order=round(in_order_us, 2),
        over_in_order=round(in_order_us / medians["autoflash"], 3),
        spread_percent={each: round(one.spread_percent, 2) for each, one in times.items()},
        sm_clock_mhz={each: one.sm_clock_mhz for each, one in times.items()},
        rounds=len(times["autoflash"].samples_us),
        **more,
    )


def tell(result: Mapping[str, Any]) -> None:
    """The case in one line."""
    peer = result["peers"].get("flash_attention_3")
    told = f"autoflash {result['ours']} us  FlashAttention-3 {peer}  ratio {result['ratio']}"
    print(f"{result['case']['name']}: {told}  over keys in order {result['over_in_order']}")
    for name, reason in result.get("unavailable", {}).items():
        print(f"    {name} is left out: {reason}")
    sys.stdout.flush()


def summary_of(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Geometric means and worsts over FlashAttention-3 and over keys in order."""
    summary: dict[str, Any] = {}
    for what, key in (("over_flash_attention_3", "ratio"), ("over_in_order", "over_in_order")):
        ratios = {each["case"]["name"]: each[key] for each in results if each[key]}
        if ratios:
            worst = min(ratios, key=lambda name: ratios[name])
            mean = round(geometric_mean(list(ratios.values())), 4)
            summary[what] = {"geometric_mean": mean, "worst": ratios[worst], "case": worst}
    return summary


if __name__ == "__main__":
    main()
