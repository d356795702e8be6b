"""Backward beside SDPA (cuDNN, flash), FlexAttention and FlashAttention-4: one interleaved run.

The problems of benchmarks/workloads/backward.yaml: 16384 tokens, 2048 / head_dim heads, bf16,
causal and full, lengths 1024, 4096 and 16384. Each contender's own forward ran before; what is
timed is torch.autograd.grad of its `out`, whole passes with statistics, zeroing and conversions.
TFLOP/s count five products of the visible pairs, as for 2.5 forwards. The module's own
`deterministic=True`, which adds up in a fixed order, takes its turns beside them and is no peer.
"""

import argparse
import functools
import gc
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from harness import arguments, geometric_mean, load_module, run_ahead, write_results
from prefill import name_of, result_of

from autoflash.accuracy import GradientBudget, Verdict
from autoflash.errors import DeviceError
from autoflash.gpu import detect
from autoflash.gradients import Gradients
from autoflash.inputs import Inputs, make_inputs
from autoflash.peers import backward, ours, peer_versions
from autoflash.peers.contender import Maker, told
from autoflash.problem import Problem
from autoflash.roofline import floor
from autoflash.telemetry import Telemetry
from autoflash.turns import (
    STEADY,
    Call,
    QueuedBurst,
    Times,
    buffer_sets,
    rounds_of,
    take_turns,
)
from autoflash.workload import load_workload

WORKLOAD = Path(__file__).parent / "workloads" / "backward.yaml"
NAMES = ("cudnn", "flash", "flex_attention", "flash_attention_4")


def main() -> None:
    options = parsed()
    gpu = detect()
    problems = [p for p, _ in load_workload(options.workload).problems if p.op == "backward"]
    problems = [p for p in problems if not p.deterministic]  # which takes its turns with each
    named = {name_of(p): p for p in problems if options.cases in name_of(p)}
    started = time.monotonic()
    compile_ahead(named, options.module, options.processes)
    module = load_module(options.module)
    results, summary, path = [], {}, None
    for name, problem in named.items():
        sets = buffer_sets(floor(problem, gpu).bytes_moved, gpu.l2_bytes)
        inputs = [make_inputs(problem, seed, "cuda") for seed in range(sets)]
        calls, left_out, errors = admitted(name, inputs, makers_of(module))
        times = timed(calls, 1e3 * options.gpu_ms)
        repeating = times.pop("deterministic", None)
        result = result_of(name, problem, gpu, times, left_out, errors_over_eager=errors)
        flex, own = times.get("flex_attention"), times["autoflash"]
        result["deterministic"] = round(repeating.median_us, 2) if repeating else None
        result["of_best"] = round(own.median_us / repeating.median_us, 4) if repeating else None
        result["over_flex"] = round(flex.median_us / own.median_us, 4) if flex else None
        results.append(result)
        rates = "  ".join(f"{each} {rate:.0f}" for each, rate in result["tflops"].items())
        print(f"{name:18s} TFLOP/s {rates}  ratio {result['ratio']}", end="")
        print(f"  deterministic {result['of_best']} of the best")
        for peer, reason in left_out.items():
            print(f"    {peer} is left out: {reason}")
        sys.stdout.flush()
        # after every case: whoever stops the run keeps what was done
        seconds = {"all": round(time.monotonic() - started)}
        summary = {what: figures(results, what) for what in ("ratio", "over_flex", "of_best")}
        path = write_results("backward", results, peer_versions(), summary=summary, seconds=seconds)
        del inputs, calls
        gc.collect()
        torch.cuda.empty_cache()
    print(summary)
    print(path)


def parsed() -> argparse.Namespace:
    parser = arguments(__doc__ or "")
    parser.add_argument("--workload", type=Path, default=WORKLOAD)
    parser.add_argument(
        "--gpu-ms", type=float, default=400.0, help="of GPU time for a contender of a case"
    )
    parser.add_argument(
        "--processes", type=int, default=8, help="that compile ahead of the timing; 0 for none"
    )
    return parser.parse_args()


def makers_of(module: ModuleType) -> dict[str, Maker]:
    """Everyone who takes part, by name."""
    repeating = SimpleNamespace(prefill=functools.partial(module.prefill, deterministic=True))
    own = {
        name: functools.partial(
            backward.differentiated, functools.partial(ours.prefill, each), None
        )
        for name, each in (("autoflash", module), ("deterministic", repeating))
    }
    return {**own, **{name: backward.PEERS[name] for name in NAMES}}


def admitted(
    name: str,
    inputs: list[Inputs],
    makers: Mapping[str, Maker],
) -> tuple[dict[str, list[Call]], dict[str, str], dict[str, float]]:
    """Calls of those whose gradients are right; why others are left out; errors over the eager's.

    Raises SystemExit when it is autoflash that is left out.
    """
    judge = referee(inputs[0])
    calls, left_out, errors = {}, {}, {}
    for contender, make in makers.items():
        try:
            made = make(inputs)
            verdict = judge(made.out())
        except Exception as error:  # a peer may raise anything: it is named with it
            left_out[contender] = told(error)
            continue
        errors[contender] = round(verdict.max_ratio, 3)
        if verdict.correct:
            calls[contender] = made.calls
        else:
            left_out[contender] = f"wrong: {verdict.reason}"
    if "autoflash" in left_out:
        raise SystemExit(f"error: {name}: autoflash: {left_out['autoflash']}")
    return calls, left_out, errors


def referee(inputs: Inputs) -> Callable[[Gradients], Verdict]:
    """Judges by the error budget of the last sequence's last KV head and its query heads."""
    p = inputs.problem
    one = replace(p, batch=1, num_heads=p.group_size, num_kv_heads=1)
    q, k, v, dout = (_last_heads(p, t) for t in (inputs.q, inputs.k, inputs.v, inputs.dout))
    budget = GradientBudget(Inputs(one, q, k, v, dout=dout))

    def judge(gradients: Gradients) -> Verdict:
        if not all(each.isfinite().all() for each in gradients):
            return Verdict("a gradient is not finite", 0.0, 0.0, 0.0)
        return budget.judge(Gradients(*(_last_heads(p, each) for each in gradients)))

    return judge


def _last_heads(problem: Problem, tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    axis = 2 if problem.layout == "bshd" else 1
    heads = max(1, tensor.shape[axis] // problem.num_kv_heads)
    return tensor[-1:].narrow(axis, tensor.shape[axis] - heads, heads)


def timed(calls: Mapping[str, Sequence[Call]], gpu_us: float) -> dict[str, Times]:
    """Times of each contender, all measured in turn; about `gpu_us` of GPU time each."""
    telemetry = Telemetry(str(torch.cuda.get_device_properties(0).uuid))
    try:
        bursts = {name: QueuedBurst(each, STEADY) for name, each in calls.items()}
    except DeviceError as error:
        raise SystemExit(f"error: {error}") from None
    return take_turns(bursts, rounds_of(list(bursts.values()), gpu_us), telemetry.clocks)


def compile_ahead(problems: Mapping[str, Problem], module: Path, processes: int) -> None:
    """Have processes fill the caches on disk of what compiles for each shape, one call each."""
    jobs = {
        f"{name}, {contender}": functools.partial(call_once, contender, problem, module)
        for name, problem in problems.items()
        for contender in ("flex_attention", "autoflash", "deterministic")
    }
    run_ahead(jobs, processes)


def call_once(contender: str, problem: Problem, module: Path) -> None:
    """One call of a contender, for what it leaves in the caches on disk."""
    makers_of(load_module(module))[contender]([make_inputs(problem, 0, "cuda")]).calls[0]()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # the other processes have cases of their own on the same card


def figures(results: Sequence[Mapping[str, Any]], what: str) -> dict[str, Any]:
    """Geometric mean and worst of a ratio over the cases that have it."""
    ratios = {each["case"]["name"]: each[what] for each in results if each[what]}
    worst = min(ratios, key=lambda name: ratios[name], default="")
    mean = round(geometric_mean(list(ratios.values())), 4) if ratios else None
    return {"cases": len(ratios), "geometric_mean": mean, "worst": ratios.get(worst), "case": worst}


if __name__ == "__main__":
    main()
