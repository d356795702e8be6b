"""Peers in prefill, each called as its users call it. One that cannot do a case raises."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from autoflash.inputs import Inputs
from autoflash.peers.abilities import flash_arguments, refuse, rounded_sinks
from autoflash.peers.caches import tokens_first
from autoflash.peers.contender import Contender, Maker, Unavailable
from autoflash.peers.flex import flex_attention
from autoflash.peers.layouts import (
    Tensors,
    from_layout,
    from_packed,
    in_layout,
    packed,
    packed_queries,
)
from autoflash.problem import Problem

FLASHINFER_WORKSPACE = 256 * 2**20


def sdpa(backend: SDPBackend, inputs: list[Inputs]) -> Contender:
    """torch's scaled_dot_product_attention, held to one backend; causal stands in a bias's mask."""
    p = inputs[0].problem
    has = () if backend == SDPBackend.FLASH_ATTENTION else ("bias",)
    refuse(p, has=has, unpassed=("packed", "deterministic"))
    if p.causal and p.seqlen_q != p.seqlen_k and not p.bias:
        raise Unavailable("its causal mask is aligned top-left")

    def call(tensors: Tensors, mask: torch.Tensor | None) -> torch.Tensor:
        causal = p.causal and mask is None  # torch takes one of both
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                *tensors, attn_mask=mask, is_causal=causal, enable_gqa=p.group_size > 1
            )

    calls = [functools.partial(call, in_layout(one, "bhsd"), mask_of(one)) for one in inputs]
    return Contender(list(calls), from_layout(p, "bhsd"))


def mask_of(one: Inputs) -> torch.Tensor | None:
    """The bias of the inputs, -inf where a causal mask hides; None without a bias."""
    p = one.problem
    if one.bias is None or not p.causal:
        return one.bias
    seen = torch.ones(p.seqlen_q, p.seqlen_k, dtype=torch.bool, device=one.q.device)
    return one.bias.masked_fill(~seen.tril(p.seqlen_k - p.seqlen_q), float("-inf"))


def flash_attention_3(inputs: list[Inputs]) -> Contender:
    """FlashAttention-3's varlen call, as vLLM ships it, which has no backward.

    Its sinks are bf16: others are rounded before the call.
    """
    from vllm.vllm_flash_attn.flash_attn_interface import (  # pyright: ignore[reportMissingImports]
        flash_attn_varlen_func,
    )

    p = inputs[0].problem
    refuse(p, has=("window", "right", "softcap", "sinks", "packed", "pages"))
    calls = []
    for one in inputs:
        if p.paged:
            tensors, starts_q = over_pages(one)
            keys = {"seqused_k": one.cache_seqlens, "block_table": one.block_table}
        else:
            tensors, starts_q, starts_k = packed(one)
            keys = {"cu_seqlens_k": starts_k}
        calls.append(
            functools.partial(
                flash_attn_varlen_func,
                *tensors,
                max_seqlen_q=p.seqlen_q,
                cu_seqlens_q=starts_q,
                max_seqlen_k=p.seqlen_k,
                causal=p.causal,
                fa_version=3,
                **keys,
                **flash_arguments(one, s_aux=rounded_sinks(one)),
            )
        )
    return Contender(calls, from_packed(p))


def flash_attention_4(inputs: list[Inputs]) -> Contender:
    """flash-attn-4's CuTe kernels."""
    from flash_attn.cute import interface  # pyright: ignore[reportMissingImports]

    p = inputs[0].problem
    passed = ("window", "right", "softcap", "sinks", "packed", "pages")
    left = ("alibi", "bias", "blocks", "documents", "prefix", "mask", "deterministic")
    refuse(p, has=passed, unpassed=left)

    def call(tensors: Tensors, **beside: Any) -> torch.Tensor:
        dense = not (p.varlen or p.paged)
        attend = interface.flash_attn_func if dense else interface.flash_attn_varlen_func
        out, _ = attend(*tensors, causal=p.causal, **beside)
        return out

    calls = []
    for one in inputs:
        beside = flash_arguments(one, None, learnable_sink=one.sinks)
        if p.paged:
            tensors, starts_q = over_pages(one)
            beside |= {"cu_seqlens_q": starts_q, "max_seqlen_q": p.seqlen_q}
            beside |= {"seqused_k": one.cache_seqlens, "page_table": one.block_table}
        else:
            tensors, beside = in_flash_layout(one), beside | starts_of(one)
        calls.append(functools.partial(call, tensors, **beside))
    return Contender(calls, from_packed(p) if p.paged else from_flash_layout(p))


def over_pages(one: Inputs) -> tuple[Tensors, torch.Tensor]:
    """Queries packed, the caches of K and V tokens first; and where each one's queries begin."""
    q, starts_q = packed_queries(one)
    k, v = (tokens_first(cache, one.problem.kv_layout) for cache in (one.k, one.v))
    return (q, k, v), starts_q


def flash_attention_2(inputs: list[Inputs]) -> Contender:
    """FlashAttention-2's call."""
    from flash_attn import (  # pyright: ignore[reportMissingImports]
        flash_attn_func,
        flash_attn_varlen_func,
    )

    p = inputs[0].problem
    passed = ("window", "right", "softcap", "alibi", "packed")
    refuse(p, has=passed, unpassed=("pages", "deterministic"))
    calls = []
    for one in inputs:
        attend = flash_attn_varlen_func if p.varlen else flash_attn_func
        beside = flash_arguments(one, alibi_slopes=one.alibi_slopes) | starts_of(one)
        calls.append(functools.partial(attend, *in_flash_layout(one), causal=p.causal, **beside))
    return Contender(calls, from_flash_layout(p))


def in_flash_layout(one: Inputs) -> Tensors:
    """Packed, or bshd."""
    return packed(one)[0] if one.problem.varlen else in_layout(one, "bshd")


def from_flash_layout(problem: Problem) -> Callable[[torch.Tensor], torch.Tensor]:
    return from_packed(problem) if problem.varlen else from_layout(problem, "bshd")


def starts_of(one: Inputs) -> dict[str, Any]:
    """Where packed sequences begin, as both calls of FlashAttention take it."""
    p = one.problem
    if not p.varlen:
        return {}
    starts = {"cu_seqlens_q": one.cu_seqlens_q, "cu_seqlens_k": one.cu_seqlens_k}
    return {**starts, "max_seqlen_q": p.seqlen_q, "max_seqlen_k": p.seqlen_k}


def flashinfer(inputs: list[Inputs]) -> Contender:
    """FlashInfer's ragged wrapper, planned on the host once, as its users do each step."""
    import flashinfer  # pyright: ignore[reportMissingImports]

    p = inputs[0].problem
    refuse(p, has=("window", "softcap", "packed"), unpassed=("pages", "mask"))
    heads = (p.num_heads, p.num_kv_heads, p.head_dim)
    calls = []
    for one in inputs:
        tensors, *starts = packed(one)
        beside: dict[str, Any] = {"window_left": p.window_left} if p.windowed else {}
        beside |= {"logits_soft_cap": one.softcap} if p.softcap else {}
        beside |= {"head_dim_vo": p.head_dim_v} if p.head_dim_v != p.head_dim else {}
        workspace = torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=one.q.device)
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(*starts, *heads, causal=p.causal, q_data_type=one.q.dtype, **beside)
        calls.append(functools.partial(wrapper.run, *tensors))
    return Contender(calls, from_packed(p))


def xformers(inputs: list[Inputs]) -> Contender:
    """xFormers' memory-efficient attention; grouped heads as an axis of their own."""
    from xformers.ops import (  # pyright: ignore[reportMissingImports]
        LowerTriangularFromBottomRightMask,
        memory_efficient_attention,
    )

    p = inputs[0].problem
    refuse(p, unpassed=("window", "right", "bias", "packed", "documents", "pages"))
    mask = LowerTriangularFromBottomRightMask() if p.causal else None
    calls = []
    for one in inputs:
        q, k, v = in_layout(one, "bshd")
        if p.group_size > 1:
            q = q.unflatten(2, (p.num_kv_heads, p.group_size))
            k, v = (each.unsqueeze(3).expand(-1, -1, -1, p.group_size, -1) for each in (k, v))
        calls.append(functools.partial(memory_efficient_attention, q, k, v, attn_bias=mask))
    to_problem = from_layout(p, "bshd")
    return Contender(calls, lambda out: to_problem(out.flatten(2, -2)))


PEERS: dict[str, Maker] = {
    "cudnn": functools.partial(sdpa, SDPBackend.CUDNN_ATTENTION),
    "math": functools.partial(sdpa, SDPBackend.MATH),
    "flash": functools.partial(sdpa, SDPBackend.FLASH_ATTENTION),
    "flex_attention": flex_attention,
    "flash_attention_2": flash_attention_2,
    "flash_attention_3": flash_attention_3,
    "flash_attention_4": flash_attention_4,
    "flashinfer": flashinfer,
    "xformers": xformers,
}
