"""Decode beside FlashInfer and FlashAttention-3: 20 paged cases, one interleaved run.

One query token a sequence, page 16, bf16; caches rotate so that none is served from L2. Ragged
lengths are uniform in [L/8, L], the first one L.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
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

from autoflash.accuracy import Budget
from autoflash.gpu import detect
from autoflash.inputs import Inputs, make_inputs
from autoflash.problem import Problem
from autoflash.roofline import floor

PAGE_SIZE = 16
SHAPES = (  # batch, num_heads, num_kv_heads, seqlen_k, head_dim
    (1, 32, 8, 1024, 128),
    (1, 32, 8, 4096, 128),
    (1, 32, 8, 32768, 128),
    (8, 32, 8, 8192, 128),
    (64, 32, 8, 1024, 128),
    (64, 32, 8, 4096, 128),
    (128, 32, 8, 8192, 128),
    (16, 64, 8, 16384, 128),
    (32, 32, 32, 2048, 128),
    (32, 16, 1, 8192, 256),
)
CHECKED_BYTES = 2**31  # caches larger than this are not compared with the fp64 reference


def flashinfer_calls(inputs: list[Inputs]) -> list[Call]:
    """FlashInfer's paged decode, planned on the host once, as its users do each step."""
    try:
        import flashinfer
    except ImportError as error:
        raise Unavailable(f"flashinfer: {error}") from None
    calls = []
    for one in inputs:
        p = one.problem
        assert one.cache_seqlens is not None and one.block_table is not None
        pages = (one.cache_seqlens + p.page_size - 1) // p.page_size
        indptr = torch.zeros(p.batch + 1, dtype=torch.int32, device=one.q.device)
        indptr[1:] = pages.cumsum(0)
        used = torch.arange(one.block_table.shape[1], device=one.q.device)[None] < pages[:, None]
        workspace = torch.empty(256 * 2**20, dtype=torch.uint8, device=one.q.device)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=p.group_size > 1
        )
        wrapper.plan(
            indptr,
            one.block_table[used],
            (one.cache_seqlens - 1) % p.page_size + 1,
            p.num_heads,
            p.num_kv_heads,
            p.head_dim,
            p.page_size,
            q_data_type=one.q.dtype,
            kv_data_type=one.k.dtype,
        )
        calls.append(functools.partial(wrapper.run, one.q[:, 0], (one.k, one.v)))
    return calls


def flash_attention_3_calls(inputs: list[Inputs]) -> list[Call]:
    """FlashAttention-3's varlen call over a paged cache, as vLLM ships it."""
    try:
        from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func
    except ImportError as error:
        raise Unavailable(f"vllm's flash-attention 3: {error}") from None
    calls = []
    for one in inputs:
        p = one.problem
        calls.append(
            functools.partial(
                flash_attn_varlen_func,
                one.q[:, 0],
                one.k,
                one.v,
                max_seqlen_q=1,
                cu_seqlens_q=torch.arange(p.batch + 1, dtype=torch.int32, device=one.q.device),
                max_seqlen_k=p.seqlen_k,
                seqused_k=one.cache_seqlens,
                block_table=one.block_table,
                causal=True,
                fa_version=3,
            )
        )
    return calls


PEERS: dict[str, Callable[[list[Inputs]], list[Call]]] = {
    "flashinfer": flashinfer_calls,
    "flash_attention_3": flash_attention_3_calls,
}


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--no-hints", action="store_true", help="leave out max_seqlen_k, lengths")
    options = parser.parse_args()
    module = load_module(options.module)
    gpu = detect()
    results = []
    for lengths in ("equal", "ragged"):
        for batch, num_heads, num_kv_heads, seqlen_k, head_dim in SHAPES:
            problem = Problem(
                op="decode",
                dtype="bf16",
                batch=batch,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                seqlen_q=1,
                seqlen_k=seqlen_k,
                page_size=PAGE_SIZE,
                lengths=lengths,
            )
            name = f"{batch} {num_heads}/{num_kv_heads} {seqlen_k} {head_dim} {lengths}"
            if options.cases in name:
                hints = {} if options.no_hints else {"max_seqlen_k": seqlen_k, "lengths": lengths}
                results.append(run_case(name, problem, module, hints, gpu.l2_bytes))
                torch.cuda.empty_cache()
    ratios = [result["ratio"] for result in results if result["ratio"]]
    summary = {"geometric_mean": round(geometric_mean(ratios), 4), "worst": min(ratios, default=0)}
    print(f"ratio to the best peer: geometric mean {summary['geometric_mean']}, {summary['worst']}")
    suffix = "-no-hints" if options.no_hints else ""
    print(write_results(f"decode{suffix}", results, **summary))


def run_case(
    name: str, problem: Problem, module: ModuleType, hints: dict[str, Any], l2_bytes: int
) -> dict[str, Any]:
    moved = floor(problem, detect()).bytes_moved
    sets = buffer_sets(moved, l2_bytes)
    inputs = [make_inputs(problem, seed, "cuda", poison=False) for seed in range(sets)]
    # one set of lengths for all, so that every call of a graph does the same work
    for one in inputs[1:]:
        one.cache_seqlens.copy_(inputs[0].cache_seqlens)
    contenders = {
        "autoflash": [
            functools.partial(
                module.decode,
                one.q[:, 0],
                one.k,
                one.v,
                one.cache_seqlens,
                block_table=one.block_table,
                **hints,
            )
            for one in inputs
        ]
    }
    unavailable = {}
    for peer, make_calls in PEERS.items():
        try:
            contenders[peer] = make_calls(inputs)
            contenders[peer][0]()
        except Unavailable as error:
            unavailable[peer] = str(error)
    errors = {}
    if moved <= CHECKED_BYTES:
        budget = Budget(inputs[0])
        for contender, calls in contenders.items():
            out = calls[0]()
            verdict = budget.judge(out.unsqueeze(1), None)
            errors[contender] = round(verdict.max_ratio, 3)
            if contender == "autoflash" and not verdict.correct:
                raise SystemExit(f"error: {name}: {verdict.reason}")
    times = interleaved_us(contenders)
    how = module.explain(contenders["autoflash"][0])
    result = case_result(
        {"name": name, "page_size": PAGE_SIZE, "lengths": problem.lengths},
        times,
        unavailable,
        tb_per_s=round(moved / times["autoflash"] / 1e6, 3),
        errors_over_eager=errors,
        served={"how": how["how"], "family": how["family"], "knobs": how["knobs"]},
    )
    shown = "  ".join(f"{contender} {us:.1f}" for contender, us in times.items())
    print(f"{name:32s} {shown}  ratio {result['ratio']}  ({how['how']})", flush=True)
    return result


if __name__ == "__main__":
    main()
