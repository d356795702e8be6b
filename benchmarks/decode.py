"""Decode beside SDPA (cuDNN), FlashInfer, FlashAttention-3 and 4 and vLLM's Triton kernel.

The problems of benchmarks/workloads/decode.yaml (20 paged cases) and decode-more.yaml (other pages
and layouts, quantised caches, several query tokens, large batches, long contexts); each case is one
interleaved run. Beside all stands a plain kernel that reads as many bytes. Caches rotate so that
none is served from L2; ragged lengths are uniform in [L/8, L], the first one L.
"""

import argparse
import gc
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from decode_peers import PEERS
from harness import arguments, case_result, geometric_mean, load_module, write_results
from read_floor import fastest_readers

from autoflash.accuracy import Budget, Verdict
from autoflash.check import picked, sample_rows
from autoflash.decision import paired_interval
from autoflash.gpu import Gpu, detect
from autoflash.inputs import Inputs, make_inputs
from autoflash.peers import ours, peer_versions
from autoflash.peers.contender import Contender, Maker, told
from autoflash.problem import Problem
from autoflash.roofline import cache_bytes, floor
from autoflash.turns import STEADY, Times, buffer_sets, interleaved
from autoflash.workload import load_workload

FOLDER = Path(__file__).parent / "workloads"
WORKLOADS = [FOLDER / "decode.yaml", FOLDER / "decode-more.yaml"]
READ = "read"  # what is timed beside autoflash and is no peer
WHOLE_BYTES = 2**28  # larger caches are judged by some of their rows
ONE_SET_BYTES = 2**32  # larger caches are cold without a second one
FREE_SHARE = 0.9  # of the GPU's free memory that inputs may take
CLIFF = 1.10  # how much slower than a neighbour with more work is too much


def main() -> None:
    options = parsed()
    module, gpu = load_module(options.module), detect()
    timed = partial(interleaved, gpu_us=1e3 * options.gpu_ms, pace=STEADY)
    stem = "decode" if options.workload == WORKLOADS else options.workload[0].stem
    stem += "-no-hints" if options.no_hints else ""
    started, results, summary = time.monotonic(), [], {}
    done = set()
    for workload in options.workload:
        for problem, _ in load_workload(workload).problems:
            if options.cases not in name_of(problem) or problem in done:
                continue
            done.add(problem)
            makers = makers_of(module, problem, options.peers, not options.no_hints)
            result = run_case(problem, makers, module, gpu, timed)
            if result:
                results.append({**result, "workload": workload.stem})
                tell(result)
                summary, seconds = summary_of(results), round(time.monotonic() - started)
                write_results(stem, results, peer_versions(), summary=summary, seconds=seconds)
            gc.collect()
            torch.cuda.empty_cache()
    for what, figures in summary.items():
        print(what, figures)


def parsed() -> argparse.Namespace:
    parser = arguments(__doc__ or "")
    parser.add_argument("--workload", type=Path, nargs="+", default=WORKLOADS)
    parser.add_argument(
        "--no-hints", action="store_true", help="leave out max_seqlen_k, lengths and pages"
    )
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=list(PEERS))
    parser.add_argument(
        "--gpu-ms", type=float, default=400.0, help="of GPU time for a contender of a case"
    )
    return parser.parse_args()


def name_of(problem: Problem) -> str:
    """A case in a few words: `1 32/8 1024 128 equal`, and what is not as in the 20 cases."""
    p = problem
    words = [str(p.batch), f"{p.num_heads}/{p.num_kv_heads}", str(p.seqlen_k), str(p.head_dim)]
    words.append(p.lengths)
    if p.page_size != 16:
        words.append(f"page {p.page_size}" if p.paged else "contiguous")
    if p.pages in ("contiguous", "shared"):
        words.append(f"{p.pages} pages")
    if p.kv_layout != "nhd":
        words.append(p.kv_layout)
    if p.dtype != "bf16":
        words.append(p.dtype)
    if p.quantised:
        words.append(f"{p.kv_dtype} {p.kv_scales}")
    if p.seqlen_q > 1:
        words.append(f"{p.seqlen_q} queries")
    return " ".join(words)


def makers_of(
    module: ModuleType, problem: Problem, peers: Sequence[str], hints: bool
) -> dict[str, Maker]:
    """Everyone who takes part, by name."""
    autoflash = partial(ours.decode, module, ours.hints_of(problem) if hints else {})
    return {"autoflash": autoflash, **{name: PEERS[name] for name in peers}}


def run_case(
    problem: Problem,
    makers: Mapping[str, Maker],
    module: ModuleType,
    gpu: Gpu,
    timed: Callable[[Mapping[str, Sequence[Any]]], Mapping[str, Times]],
) -> dict[str, Any] | None:
    """One case of the results; None, and a line that says so, where there is no room for it."""
    name, moved = name_of(problem), floor(problem, gpu).bytes_moved
    sets = 1 if moved > ONE_SET_BYTES else buffer_sets(moved, gpu.l2_bytes)
    if sets * moved > FREE_SHARE * torch.cuda.mem_get_info()[0]:
        print(f"{name}: left out, its caches do not fit into the GPU's memory")
        return None
    inputs = [make_inputs(problem, seed, "cuda", poison=False) for seed in range(sets)]
    for one in inputs[1:]:  # one set of lengths for all: every call of a graph does the same work
        one.cache_seqlens.copy_(inputs[0].cache_seqlens)
    contenders, left_out, imprecise, errors = admitted(name, inputs, makers)
    calls = {each: contender.calls for each, contender in contenders.items()}
    calls[READ] = fastest_readers(inputs, gpu.num_sms)
    times = timed(calls)
    how = module.explain(contenders["autoflash"].calls[0])
    served = {key: how[key] for key in ("how", "family", "knobs")}
    return result_of(
        name, problem, times, left_out, imprecise, errors_over_eager=errors, served=served
    )


def admitted(
    name: str, inputs: list[Inputs], makers: Mapping[str, Maker]
) -> tuple[dict[str, Contender], dict[str, str], dict[str, str], dict[str, float]]:
    """Contenders; why others are left out; who is beyond the error budget; errors over eager's.

    A peer that rounds more than we may, as one whose queries are fp8, is timed and is no peer of
    the ratio. Raises SystemExit when it is autoflash that is left out or imprecise.
    """
    judge = referee(inputs[0])
    contenders, left_out, imprecise, errors = {}, {}, {}, {}
    for contender, make in makers.items():
        try:
            made = make(inputs)
            out = made.out()
            for call in made.calls[1:]:
                call()
            verdict = judge(out)
        except Exception as error:  # a peer may raise anything: it is named with it
            left_out[contender] = told(error)
            continue
        if not out.isfinite().all():
            left_out[contender] = "wrong: out is not finite"
            continue
        contenders[contender] = made
        errors[contender] = round(verdict.max_ratio, 3)
        if not verdict.correct:
            imprecise[contender] = verdict.reason
    for wrong in (left_out, imprecise):
        if "autoflash" in wrong:
            raise SystemExit(f"error: {name}: autoflash: {wrong['autoflash']}")
    return contenders, left_out, imprecise, errors


def referee(inputs: Inputs) -> Callable[[torch.Tensor], Verdict]:
    """Judges an output by the error budget: whole, or some rows of a large problem."""
    problem = inputs.problem
    if cache_bytes(problem) <= WHOLE_BYTES:
        whole = Budget(inputs)
        return lambda out: whole.judge(out, None)
    rows = sample_rows(problem, seed=0)
    budget = Budget(inputs, rows=rows)
    return lambda out: budget.judge(picked(problem, out, None, rows)[0], None)


def result_of(
    name: str,
    problem: Problem,
    times: Mapping[str, Times],
    left_out: Mapping[str, str],
    imprecise: Mapping[str, str],
    **more: Any,
) -> dict[str, Any]:
    """One case of the results. `of_read_percent` is the read's time in percent of ours.

    `ratio_interval` is that of the paired rounds of autoflash and the best peer, at 95 %.
    """
    p = problem
    medians = {each: one.median_us for each, one in times.items()}
    peers = {each: us for each, us in medians.items() if each != READ and each not in imprecise}
    best = min((each for each in peers if each != "autoflash"), key=peers.__getitem__, default=None)
    beside = None
    if best is not None:
        paired = paired_interval(times[best].samples_us, times["autoflash"].samples_us)
        beside = {"peer": best, "low": round(1 + paired.low, 4), "high": round(1 + paired.high, 4)}
    case = {
        "name": name,
        "batch": p.batch,
        "num_heads": p.num_heads,
        "num_kv_heads": p.num_kv_heads,
        "head_dim": p.head_dim,
        "seqlen_q": p.seqlen_q,
        "seqlen_k": p.seqlen_k,
        "page_size": p.page_size,
        "pages": p.pages,
        "kv_layout": p.kv_layout,
        "lengths": p.lengths,
        "kv_dtype": p.kv_dtype,
        "kv_scales": p.kv_scales,
    }
    cached, ours, read = cache_bytes(p), medians["autoflash"], medians.get(READ)
    return case_result(
        case,
        peers,
        left_out,
        ratio_interval=beside,
        imprecise={each: [round(medians[each], 2), why] for each, why in imprecise.items()},
        cache_mib=round(cached / 2**20, 1),
        tb_per_s=round(cached / ours / 1e6, 3),
        read_us=round(read, 2) if read else None,
        of_read_percent=round(100 * read / ours, 1) if read else None,
        spread_percent={each: round(one.spread_percent, 2) for each, one in times.items()},
        sm_clock_mhz={each: one.sm_clock_mhz for each, one in times.items()},
        regime={each: one.regime for each, one in times.items()},
        rounds=len(times["autoflash"].samples_us),
        **more,
    )


def tell(result: Mapping[str, Any]) -> None:
    """The case in one line, and a line for each peer that is not in it."""
    peers = "  ".join(f"{each} {us}" for each, us in result["peers"].items())
    how, ratio = result["served"]["how"], result["ratio"]
    print(
        f"{result['case']['name']:40s} {result['ours']} us  {peers}  ratio {ratio},"
        f" {result['of_read_percent']} % of a read of {result['cache_mib']} MiB ({how})"
    )
    for peer, (us, why) in result["imprecise"].items():
        print(f"    {peer} {us} us is less precise: {why}")
    for peer, reason in result.get("unavailable", {}).items():
        print(f"    {peer} is left out: {reason}")
    sys.stdout.flush()


def summary_of(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Geometric mean and worst of autoflash over the best peer of each workload; cliffs."""
    ratios: dict[str, dict[str, float]] = defaultdict(dict)
    for result in results:
        if result["ratio"]:
            ratios[result["workload"]][result["case"]["name"]] = result["ratio"]
    summary: dict[str, Any] = {
        workload: {
            "cases": len(of_workload),
            "geometric_mean": round(geometric_mean(list(of_workload.values())), 4),
            "worst": min(of_workload.values()),
            "worst_case": min(of_workload, key=of_workload.__getitem__),
        }
        for workload, of_workload in ratios.items()
    }
    return {**summary, "cliffs": cliffs(results)}


def cliffs(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Cases that are more than CLIFF slower than one with as many or more sequences and keys."""
    points = {}
    for result in results:
        case = {k: v for k, v in result["case"].items() if k not in ("name", "batch", "seqlen_k")}
        size = (result["case"]["batch"], result["case"]["seqlen_k"])
        points[tuple(case.items()), size] = (result["ours"], result["case"]["name"])
    return [
        f"{name} {us} us, {more_name} {more_us} us"
        for ((case, size), (us, name)), ((other, more), (more_us, more_name)) in product(
            points.items(), repeat=2
        )
        if case == other and size[0] <= more[0] and size[1] <= more[1] and us > CLIFF * more_us
    ]


if __name__ == "__main__":
    main()
