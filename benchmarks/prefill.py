"""Prefill beside SDPA (cuDNN, flash) and FlashAttention-3: one interleaved run.

16384 tokens, 2048 / head_dim heads, bf16, causal and full, lengths 512 to 16384.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from harness import (
    Call,
    Unavailable,
    arguments,
    buffer_sets,
    case_result,
    geometric_mean,
    interleaved_us,
    load_module,
    write_results,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

from autoflash.accuracy import Budget
from autoflash.gpu import detect
from autoflash.inputs import Inputs, make_inputs
from autoflash.problem import Problem
from autoflash.roofline import floor

TOKENS = 16384
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
CHECKED_SEQLEN = 2048  # longer ones are not compared with the fp64 reference


def sdpa_calls(backend: SDPBackend) -> Callable[[list[Inputs]], list[Call]]:
    def make_calls(inputs: list[Inputs]) -> list[Call]:
        def call(one: Inputs) -> torch.Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(
                    one.q, one.k, one.v, is_causal=one.problem.causal
                )

        try:
            call(inputs[0])
        except RuntimeError as error:
            raise Unavailable(f"{backend}: {error}") from None
        return [functools.partial(call, one) for one in inputs]

    return make_calls


def flash_attention_3_calls(inputs: list[Inputs]) -> list[Call]:
    """FlashAttention-3's varlen call, as vLLM ships it."""
    try:
        from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func
    except ImportError as error:
        raise Unavailable(f"vllm's flash-attention 3: {error}") from None
    calls = []
    for one in inputs:
        p = one.problem
        # its layout is tokens before heads: contiguous copies of the same values
        q, k, v = (t.transpose(1, 2).flatten(0, 1).contiguous() for t in (one.q, one.k, one.v))
        starts = torch.arange(p.batch + 1, dtype=torch.int32, device=q.device) * p.seqlen_q
        call = functools.partial(
            flash_attn_varlen_func,
            q,
            k,
            v,
            max_seqlen_q=p.seqlen_q,
            cu_seqlens_q=starts,
            max_seqlen_k=p.seqlen_k,
            cu_seqlens_k=starts,
            causal=p.causal,
            fa_version=3,
        )
        calls.append(call)
    return calls


PEERS: dict[str, Callable[[list[Inputs]], list[Call]]] = {
    "cudnn": sdpa_calls(SDPBackend.CUDNN_ATTENTION),
    "flash": sdpa_calls(SDPBackend.FLASH_ATTENTION),
    "flash_attention_3": flash_attention_3_calls,
}


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--head-dims", default="64,128,256")
    parser.add_argument("--lengths", default=",".join(str(n) for n in LENGTHS))
    options = parser.parse_args()
    module = load_module(options.module)
    l2_bytes = detect().l2_bytes
    results = []
    for head_dim in (int(d) for d in options.head_dims.split(",")):
        for causal in (True, False):
            for seqlen in (int(n) for n in options.lengths.split(",")):
                problem = Problem(
                    op="prefill",
                    dtype="bf16",
                    batch=TOKENS // seqlen,
                    num_heads=2048 // head_dim,
                    num_kv_heads=2048 // head_dim,
                    head_dim=head_dim,
                    seqlen_q=seqlen,
                    seqlen_k=seqlen,
                    causal=causal,
                    layout="bhsd",
                )
                name = f"{head_dim} {'causal' if causal else 'full'} {seqlen}"
                if options.cases in name:
                    results.append(run_case(name, problem, module, l2_bytes))
    ratios = [result["ratio"] for result in results if result["ratio"]]
    summary = {"geometric_mean": round(geometric_mean(ratios), 4), "worst": min(ratios, default=0)}
    print(f"ratio to the best peer: geometric mean {summary['geometric_mean']}, {summary['worst']}")
    print(write_results("prefill", results, **summary))


def run_case(name: str, problem: Problem, module: ModuleType, l2_bytes: int) -> dict[str, Any]:
    work = floor(problem, detect())
    sets = buffer_sets(work.bytes_moved, l2_bytes)
    inputs = [make_inputs(problem, seed, "cuda") for seed in range(sets)]
    ours = functools.partial(module.prefill, causal=problem.causal, layout="bhsd")
    contenders = {"autoflash": [functools.partial(ours, one.q, one.k, one.v) for one in inputs]}
    unavailable = {}
    for peer, make_calls in PEERS.items():
        try:
            contenders[peer] = make_calls(inputs)
            contenders[peer][0]()
        except Unavailable as error:
            unavailable[peer] = str(error)
    if problem.seqlen_k <= CHECKED_SEQLEN:
        verdict = Budget(inputs[0]).judge(contenders["autoflash"][0](), None)
        if not verdict.correct:
            raise SystemExit(f"error: {name}: {verdict.reason}")
    times = interleaved_us(contenders)
    how = module.explain(contenders["autoflash"][0])
    rates = {contender: round(work.tflops(us), 1) for contender, us in times.items()}
    cudnn = times.get("cudnn")
    result = case_result(
        {"name": name, "batch": problem.batch, "num_heads": problem.num_heads},
        times,
        unavailable,
        tflops=rates,
        of_cudnn=round(cudnn / times["autoflash"], 4) if cudnn else None,
        served={"how": how["how"], "family": how["family"], "knobs": how["knobs"]},
    )
    shown = "  ".join(f"{contender} {rate:.0f}" for contender, rate in rates.items())
    print(
        f"{name:20s} TFLOP/s {shown}  ratio {result['ratio']}  of cuDNN {result['of_cudnn']}"
        f"  ({how['how']})",
        flush=True,
    )
    return result


if __name__ == "__main__":
    main()
