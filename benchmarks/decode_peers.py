"""Who takes part in the decode benchmark: autoflash, and the peers, each as its users call it.

A contender is made from sets of inputs. A peer that is not installed, or cannot do a case, raises:
the benchmark names it with the reason.
"""

import functools
import importlib.metadata
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from harness import Call, Unavailable
from torch.nn.attention import SDPBackend, sdpa_kernel

from autoflash.inputs import Inputs

PAGE_OF_CONTIGUOUS = 16  # as which peers read a cache without pages
COPIED_BYTES = 8 * 2**30  # a cache of more than this is not copied for a peer
FLASHINFER_WORKSPACE = 256 * 2**20
FLASHINFER_LAYOUTS = {"nhd": "NHD", "hnd": "HND"}
# vLLM's Triton kernel splits sequences where fewer of them than this, over KV heads, are in a batch
VLLM_SMALL_BATCH = 128
VLLM_SEGMENTS = 16


@dataclass(frozen=True)
class Contender:
    """One call for each set of inputs; `shape` makes (batch, seqlen_q, num_heads, d) of it."""

    calls: list[Call]
    shape: Callable[[torch.Tensor], torch.Tensor]

    def out(self, number: int = 0) -> torch.Tensor:
        return self.shape(self.calls[number]())


Maker = Callable[[list[Inputs]], Contender]


def autoflash(module: ModuleType, hints: Mapping[str, Any], inputs: list[Inputs]) -> Contender:
    """The exported module's decode(), a single query token without an axis of its own."""
    one_token = inputs[0].problem.seqlen_q == 1
    calls = [
        functools.partial(
            module.decode,
            one.q[:, 0] if one_token else one.q,
            one.k,
            one.v,
            one.cache_seqlens,
            block_table=one.block_table,
            kv_layout=one.problem.kv_layout,
            k_scale=one.k_scale,
            v_scale=one.v_scale,
            **hints,
        )
        for one in inputs
    ]
    return Contender(list(calls), lambda out: out.unsqueeze(1) if one_token else out)


def cudnn(inputs: list[Inputs], backend: SDPBackend = SDPBackend.CUDNN_ATTENTION) -> Contender:
    """torch's scaled_dot_product_attention over contiguous copies of the sequences."""
    p = inputs[0].problem
    if p.lengths != "equal":
        raise Unavailable("its sequences have one length")
    if p.seqlen_q > 1:
        raise Unavailable("its causal mask is aligned top-left")
    if p.quantised:
        raise Unavailable(f"it reads no {p.kv_dtype} cache")
    if 2 * inputs[0].k.nbytes * len(inputs) > COPIED_BYTES:
        raise Unavailable("the copies it needs are too large")

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=p.group_size > 1)

    calls = []
    for one in inputs:
        sequences = [one.sequence(b)[1:] for b in range(p.batch)]
        k, v = (torch.stack(each) for each in zip(*sequences, strict=True))
        calls.append(functools.partial(call, one.q.transpose(1, 2), k, v))
    return Contender(calls, lambda out: out.transpose(1, 2))


def flashinfer(inputs: list[Inputs]) -> Contender:
    """FlashInfer's paged wrappers, planned on the host once, as its users do each step."""
    import flashinfer

    p = inputs[0].problem
    if p.kv_dtype == "int8":
        raise Unavailable("it reads no int8 cache")
    calls = []
    for one in inputs:
        k, v, table = paged(one)
        page_size = k.shape[1 if p.kv_layout == "nhd" else 2]
        used = -(-one.cache_seqlens // page_size)
        columns = torch.arange(table.shape[1], device=table.device)
        pages = {
            "indptr": starts(used),
            "indices": table[columns[None] < used[:, None]],
            "last_page_len": (one.cache_seqlens - 1) % page_size + 1,
        }
        workspace = torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=one.q.device)
        heads = (p.num_heads, p.num_kv_heads, p.head_dim)
        types = {"q_data_type": one.q.dtype, "kv_data_type": k.dtype}
        layout = FLASHINFER_LAYOUTS[p.kv_layout]
        if p.seqlen_q == 1:
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace, layout, use_tensor_cores=p.group_size > 1
            )
            wrapper.plan(*pages.values(), *heads, page_size, **types)
        else:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, layout)
            queries = starts(torch.full_like(used, p.seqlen_q))
            wrapper.plan(queries, *pages.values(), *heads, page_size, causal=True, **types)
        calls.append(functools.partial(wrapper.run, tokens(one), (k, v), **numbers(one)))
    return Contender(calls, functools.partial(by_sequence, p.batch))


def flash_attention_3(inputs: list[Inputs]) -> Contender:
    """FlashAttention-3's varlen call over a paged cache, as vLLM ships it.

    Over a cache in fp8 its queries are fp8 too: they are rounded before the call, as vLLM does.
    """
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    p = inputs[0].problem
    if p.kv_dtype == "int8":
        raise Unavailable("it reads no int8 cache")
    calls = []
    for one in inputs:
        k, v, table = paged(one)
        q, descales = tokens(one), {}
        if p.quantised:
            k_scale, v_scale = scale_of(one, "k"), scale_of(one, "v")
            descales = {"q_descale": torch.ones_like(k_scale)}
            descales |= {"k_descale": k_scale, "v_descale": v_scale}
            q = q.to(k.dtype)
        calls.append(
            functools.partial(
                flash_attn_varlen_func,
                q,
                tokens_first(k, p.kv_layout),
                tokens_first(v, p.kv_layout),
                max_seqlen_q=p.seqlen_q,
                cu_seqlens_q=query_starts(one),
                max_seqlen_k=p.seqlen_k,
                seqused_k=one.cache_seqlens,
                block_table=table,
                causal=True,
                fa_version=3,
                **descales,
            )
        )
    return Contender(calls, functools.partial(by_sequence, p.batch))


def flash_attention_4(inputs: list[Inputs]) -> Contender:
    """flash-attn-4's CuTe kernels over a paged cache."""
    from flash_attn.cute.interface import flash_attn_varlen_func

    p = inputs[0].problem
    if p.quantised:
        raise Unavailable(f"it reads no {p.kv_dtype} cache")
    calls = []
    for one in inputs:
        k, v, table = paged(one)
        calls.append(
            functools.partial(
                flash_attn_varlen_func,
                tokens(one),
                tokens_first(k, p.kv_layout),
                tokens_first(v, p.kv_layout),
                cu_seqlens_q=query_starts(one),
                seqused_k=one.cache_seqlens,
                page_table=table,
                causal=True,
            )
        )

    def shape(result: Any) -> torch.Tensor:
        return by_sequence(p.batch, result[0] if isinstance(result, tuple) else result)

    return Contender(calls, shape)


def vllm_triton(inputs: list[Inputs]) -> Contender:
    """vLLM's Triton kernel, with the scratch memory for split sequences that its backend gives."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    p = inputs[0].problem
    if p.kv_dtype == "int8":
        raise Unavailable("its int8 caches keep scales beside each head's values")
    if p.kv_scales == "head":
        raise Unavailable("it has one scale for all of K and one for all of V")
    segments = segment_buffers(unified_attention, inputs[0])
    calls = []
    for one in inputs:
        k, v, table = paged(one)
        out = torch.empty_like(tokens(one))
        call = functools.partial(
            unified_attention,
            q=tokens(one),
            k=tokens_first(k, p.kv_layout),
            v=tokens_first(v, p.kv_layout),
            out=out,
            cu_seqlens_q=query_starts(one),
            max_seqlen_q=p.seqlen_q,
            seqused_k=one.cache_seqlens,
            max_seqlen_k=p.seqlen_k,
            softmax_scale=p.head_dim**-0.5,
            causal=True,
            window_size=(-1, -1),
            block_table=table,
            softcap=0.0,
            q_descale=None,
            k_descale=scale_of(one, "k") if p.quantised else None,
            v_descale=scale_of(one, "v") if p.quantised else None,
            **segments,
        )
        calls.append(functools.partial(result_in, out, call))
    return Contender(calls, functools.partial(by_sequence, p.batch))


PEERS: dict[str, Maker] = {
    "cudnn": cudnn,
    "flashinfer": flashinfer,
    "flash_attention_3": flash_attention_3,
    "flash_attention_4": flash_attention_4,
    "vllm_triton": vllm_triton,
}


def paged(one: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """K, V and the table; a contiguous cache is one of pages in order."""
    if one.block_table is not None:
        return one.k, one.v, one.block_table
    p, size = one.problem, PAGE_OF_CONTIGUOUS
    if p.kv_layout != "nhd" or p.seqlen_k % size:
        raise Unavailable("it reads pages, and this cache is not one of them")
    table = torch.arange(p.batch * p.seqlen_k // size, dtype=torch.int32, device=one.q.device)
    k, v = (cache.unflatten(1, (-1, size)).flatten(0, 1) for cache in (one.k, one.v))
    return k, v, table.view(p.batch, -1)


def tokens(one: Inputs) -> torch.Tensor:
    """The queries of all sequences, one after the other: (tokens, num_heads, head_dim)."""
    return one.q.flatten(0, 1)


def by_sequence(batch: int, out: torch.Tensor) -> torch.Tensor:
    return out.unflatten(0, (batch, -1))


def tokens_first(cache: torch.Tensor, kv_layout: str) -> torch.Tensor:
    """The cache as nhd, by strides."""
    return cache.transpose(1, 2) if kv_layout == "hnd" else cache


def starts(counts: torch.Tensor) -> torch.Tensor:
    """Where each begins of what follows one another, and where the last one ends: int32."""
    return F.pad(counts.cumsum(0), (1, 0)).int()


def query_starts(one: Inputs) -> torch.Tensor:
    return starts(torch.full_like(one.cache_seqlens, one.problem.seqlen_q))


def scale_of(one: Inputs, cache: str) -> torch.Tensor:
    """The scales of a cache in fp8 as (batch, num_kv_heads)."""
    if one.problem.kv_scales == "token":
        raise Unavailable("it has no scale for each token")
    scale = one.k_scale if cache == "k" else one.v_scale
    assert scale is not None
    return scale


def numbers(one: Inputs) -> dict[str, float]:
    """The scales of a cache in fp8 as two numbers."""
    if not one.problem.quantised:
        return {}
    if one.problem.kv_scales != "tensor":
        raise Unavailable("it has one scale for all of K and one for all of V")
    return {f"{name}_scale": float(scale_of(one, name)[0, 0]) for name in ("k", "v")}


def segment_buffers(unified_attention: Call, one: Inputs) -> dict[str, Any]:
    """Scratch memory of vLLM's split kernel, where its version takes it from the caller."""
    p = one.problem
    if "seq_threshold_3D" not in inspect.signature(unified_attention).parameters:
        return {}
    small = VLLM_SMALL_BATCH // p.num_kv_heads
    rows = (max(small, p.batch * p.seqlen_q), p.num_heads, VLLM_SEGMENTS)
    block_d = 1 << (p.head_dim - 1).bit_length()
    empty = functools.partial(torch.empty, dtype=torch.float32, device=one.q.device)
    return {
        "seq_threshold_3D": small,
        "num_par_softmax_segments": VLLM_SEGMENTS,
        "softmax_segm_output": empty((*rows, block_d)),
        "softmax_segm_max": empty(rows),
        "softmax_segm_expsum": empty(rows),
    }


def result_in(out: torch.Tensor, call: Call) -> torch.Tensor:
    call()
    return out


def peer_versions() -> dict[str, str]:
    """Versions of what the peers come from, where they are installed."""
    found = {"cudnn": str(torch.backends.cudnn.version())}
    for package in ("flashinfer-python", "vllm", "flash-attn-4"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
