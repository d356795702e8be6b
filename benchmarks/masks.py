"""Masks beside FlexAttention given the same BlockMask, and beside the dense problem: one run.

The problems of benchmarks/workloads/masks.yaml: blocks at 10 % density, documents, a prefix, a
window of 4096 keys, softcaps and sinks with and without windows. Where there is no --module, the
workload is tuned first and one exported.
Each case stands beside its dense problem too, full or causal, served by the same module.
"""

import argparse
import functools
import gc
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from harness import arguments, case_result, geometric_mean, load_module, tune, write_results
from prefill import admitted, export_module

from autoflash.decision import paired_interval
from autoflash.gpu import Gpu, detect
from autoflash.inputs import Inputs, make_inputs
from autoflash.peers import ours, peer_versions
from autoflash.peers.contender import Maker
from autoflash.peers.flex import flex_attention
from autoflash.problem import Problem, title
from autoflash.roofline import floor
from autoflash.turns import STEADY, Times, buffer_sets, interleaved
from autoflash.workload import load_workload

WORKLOAD = Path(__file__).parent / "workloads" / "masks.yaml"


def main() -> None:
    options = parsed()
    gpu = detect()
    if not options.module.is_file():
        tune(options.workload, options.db, options.effort)
        export_module(options.db, options.module)
    module = load_module(options.module)
    problems = {title(p): p for p, _ in load_workload(options.workload).problems}
    results: list[dict[str, Any]] = []
    path = None
    for name, problem in problems.items():
        if options.cases in name:
            results.append(measured(name, problem, module, gpu, options.gpu_ms))
            tell(results[-1])
            # after every case: whoever stops the run keeps what was done
            summary = summary_of(results)
            path = write_results("masks", results, peer_versions(), summary=summary)
    for what, figures in summary_of(results).items():
        print(what, figures)
    print(path)


def parsed() -> argparse.Namespace:
    parser = arguments(__doc__ or "")
    parser.add_argument("--workload", type=Path, default=WORKLOAD)
    parser.add_argument("--db", type=Path, default=Path("masks.db"), help="to tune into")
    parser.add_argument("--effort", default="quick", help="of tuning, where there is no module")
    parser.add_argument(
        "--gpu-ms", type=float, default=400.0, help="of GPU time for a contender of a case"
    )
    return parser.parse_args()


def dense(inputs: Inputs) -> Inputs:
    """The same tensors under causal alone, or no mask."""
    nothing: dict[str, Any] = {"masked_by": "", "density": 0, "mask": ""}
    nothing |= {"mask_block_q": 0, "mask_block_k": 0, "window_left": -1, "window_right": -1}
    problem = replace(inputs.problem, **nothing)
    return replace(inputs, problem=problem, block_mask=None, document_ids=None, prefix_lens=None)


def measured(name: str, problem: Problem, module: Any, gpu: Gpu, ms: float) -> dict[str, Any]:
    """One case: the masked call, FlexAttention's and the dense one in turn, `ms` for each."""
    sets = buffer_sets(floor(problem, gpu).bytes_moved, gpu.l2_bytes)
    # FlexAttention follows all entries of a list
    inputs = [make_inputs(problem, seed, "cuda", poison=False) for seed in range(sets)]
    makers: dict[str, Maker] = {
        "autoflash": functools.partial(ours.prefill, module),
        "flex_attention": flex_attention,
    }
    contenders, left_out, errors = admitted(name, inputs, makers)
    calls = {each: contender.calls for each, contender in contenders.items()}
    how = module.explain(calls["autoflash"][0])
    calls["dense"] = ours.prefill(module, [dense(one) for one in inputs]).calls
    calls["dense"][0]()
    times = interleaved(calls, gpu_us=1e3 * ms, pace=STEADY)
    result = result_of(
        name,
        problem,
        times,
        left_out,
        errors_over_eager=errors,
        served={key: how[key] for key in ("how", "family", "knobs")},
    )
    del inputs, contenders, calls
    gc.collect()
    torch.cuda.empty_cache()
    return result


def result_of(
    name: str,
    problem: Problem,
    times: Mapping[str, Times],
    left_out: Mapping[str, str],
    **more: Any,
) -> dict[str, Any]:
    """One case of the results. The dense problem is no peer: `over_dense` is its time over ours."""
    p = problem
    case = {
        "name": name,
        "batch": p.batch,
        "num_heads": p.num_heads,
        "num_kv_heads": p.num_kv_heads,
        "head_dim": p.head_dim,
        "seqlen": p.seqlen_q,
        "causal": p.causal,
        "window_left": p.window_left,
        "masked_by": p.masked_by,
        "density": p.density,
        "mask": p.mask,
    }
    medians = {each: one.median_us for each, one in times.items()}
    dense_us = medians.pop("dense")
    beside = None
    if "flex_attention" in times:
        pairs = (times["flex_attention"].samples_us, times["autoflash"].samples_us)
        paired = paired_interval(*pairs)
        beside = {"low": round(1 + paired.low, 4), "high": round(1 + paired.high, 4)}
    return case_result(
        case,
        medians,
        left_out,
        ratio_interval=beside,
        dense=round(dense_us, 2),
        over_dense=round(dense_us / medians["autoflash"], 2),
        spread_percent={each: round(one.spread_percent, 2) for each, one in times.items()},
        sm_clock_mhz={each: one.sm_clock_mhz for each, one in times.items()},
        rounds=len(times["autoflash"].samples_us),
        **more,
    )


def tell(result: Mapping[str, Any]) -> None:
    """The case in one line."""
    flex = result["peers"].get("flex_attention")
    told = f"autoflash {result['ours']} us  flex {flex}  ratio {result['ratio']}"
    print(f"{result['case']['name']}: {told}  over dense {result['over_dense']}")
    for peer, reason in result.get("unavailable", {}).items():
        print(f"    {peer} is left out: {reason}")
    sys.stdout.flush()


def summary_of(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Geometric mean and worst over FlexAttention, and over the dense problem the least."""
    ratios = {each["case"]["name"]: each["ratio"] for each in results if each["ratio"]}
    summary: dict[str, Any] = {}
    if ratios:
        worst = min(ratios, key=lambda name: ratios[name])
        mean = round(geometric_mean(list(ratios.values())), 4)
        summary["over_flex"] = {"geometric_mean": mean, "worst": ratios[worst], "case": worst}
    summary["over_dense"] = {each["case"]["name"]: each["over_dense"] for each in results}
    return summary


if __name__ == "__main__":
    main()
