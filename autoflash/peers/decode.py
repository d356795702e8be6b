"""Peers in decode, each called as its users call it. One that cannot do a case raises."""

import functools
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from autoflash.inputs import Inputs
from autoflash.peers.abilities import flash_arguments, one_slope_a_head, refuse, rounded_sinks
from autoflash.peers.caches import (
    by_sequence,
    lengths_of,
    numbers,
    paged,
    query_starts,
    scale_of,
    starts,
    tokens,
    tokens_first,
)
from autoflash.peers.contender import Contender, Maker, Unavailable
from autoflash.turns import Call

FLASH_2_PAGE = 256
FLASHINFER_WORKSPACE = 256 * 2**20
FLASHINFER_LAYOUTS = {"nhd": "NHD", "hnd": "HND"}
# vLLM's Triton kernel splits sequences where fewer of them than this, over KV heads, are in a batch
VLLM_SMALL_BATCH = 128
VLLM_SEGMENTS = 16
UNPASSED = ("chosen", "latent")  # what most may have, and no adapter uses


def sdpa(backend: SDPBackend, inputs: list[Inputs]) -> Contender:
    """torch's scaled_dot_product_attention, held to one backend, of a contiguous cache.

    A bias is its mask.
    """
    p = inputs[0].problem
    has = () if backend == SDPBackend.FLASH_ATTENTION else ("bias",)
    refuse(p, has=has, unpassed=UNPASSED)
    if p.paged:
        raise Unavailable("it reads no pages")
    if p.lengths != "equal":
        raise Unavailable("its sequences have one length")
    if p.seqlen_q > 1:
        raise Unavailable("its causal mask is aligned top-left")
    if p.quantised:
        raise Unavailable(f"it reads no {p.kv_dtype} cache")

    def call(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, enable_gqa=p.group_size > 1
            )

    calls = []
    for one in inputs:
        heads_first = (t if p.kv_layout == "hnd" else t.transpose(1, 2) for t in (one.k, one.v))
        calls.append(functools.partial(call, one.q.transpose(1, 2), *heads_first, one.bias))
    return Contender(calls, lambda out: out.transpose(1, 2))


def flashinfer(inputs: list[Inputs]) -> Contender:
    """FlashInfer's paged wrappers, planned on the host once, as its users do each step."""
    import flashinfer  # pyright: ignore[reportMissingImports]

    p = inputs[0].problem
    refuse(p, has=("window", "softcap"), unpassed=UNPASSED)
    if p.kv_dtype == "int8":
        raise Unavailable("it reads no int8 cache")
    calls = []
    for one in inputs:
        k, v, table = paged(one)
        page_size = k.shape[1 if p.kv_layout == "nhd" else 2]
        lengths = lengths_of(one)
        used = -(-lengths // page_size)
        columns = torch.arange(table.shape[1], device=table.device)
        pages = {
            "indptr": starts(used),
            "indices": table[columns[None] < used[:, None]],
            "last_page_len": (lengths - 1) % page_size + 1,
        }
        workspace = torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=one.q.device)
        heads = (p.num_heads, p.num_kv_heads, p.head_dim)
        more: dict[str, Any] = {"q_data_type": one.q.dtype, "kv_data_type": k.dtype}
        more |= {"window_left": p.window_left} if p.windowed else {}
        more |= {"logits_soft_cap": one.softcap} if p.softcap else {}
        layout = FLASHINFER_LAYOUTS[p.kv_layout]
        if p.seqlen_q == 1:
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace, layout, use_tensor_cores=p.group_size > 1
            )
            wrapper.plan(*pages.values(), *heads, page_size, **more)
        else:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, layout)
            queries = starts(torch.full_like(used, p.seqlen_q))
            wrapper.plan(queries, *pages.values(), *heads, page_size, causal=True, **more)
        calls.append(functools.partial(wrapper.run, tokens(one), (k, v), **numbers(one)))
    return Contender(calls, functools.partial(by_sequence, p.batch))


def flash_attention_2(inputs: list[Inputs]) -> Contender:
    """FlashAttention-2's call over a cache, one to sixteen query tokens a sequence."""
    from flash_attn import flash_attn_with_kvcache  # pyright: ignore[reportMissingImports]

    p = inputs[0].problem
    refuse(p, has=("window", "softcap", "alibi"), unpassed=UNPASSED)
    if p.quantised:
        raise Unavailable(f"it reads no {p.kv_dtype} cache")
    if p.page_size % FLASH_2_PAGE:
        raise Unavailable(f"its pages are multiples of {FLASH_2_PAGE} tokens")
    calls = [
        functools.partial(
            flash_attn_with_kvcache,
            one.q,
            tokens_first(one.k, p.kv_layout),
            tokens_first(one.v, p.kv_layout),
            cache_seqlens=one.cache_seqlens,
            block_table=one.block_table,
            causal=True,
            **flash_arguments(one, alibi_slopes=one.alibi_slopes),
        )
        for one in inputs
    ]
    return Contender(list(calls))


def flash_attention_3(inputs: list[Inputs]) -> Contender:
    """FlashAttention-3's varlen call over a paged cache, as vLLM ships it.

    Over a cache in fp8 its queries are fp8 too: they are rounded before the call, as vLLM does. So
    are sinks to bf16, the only ones that it has.
    """
    from vllm.vllm_flash_attn.flash_attn_interface import (  # pyright: ignore[reportMissingImports]
        flash_attn_varlen_func,
    )

    p = inputs[0].problem
    refuse(p, has=("window", "softcap", "sinks"), unpassed=UNPASSED)
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
                **flash_arguments(one, s_aux=rounded_sinks(one)),
            )
        )
    return Contender(calls, functools.partial(by_sequence, p.batch))


def flash_attention_4(inputs: list[Inputs]) -> Contender:
    """flash-attn-4's CuTe kernels over a paged cache."""
    from flash_attn.cute.interface import (  # pyright: ignore[reportMissingImports]
        flash_attn_varlen_func,
    )

    p = inputs[0].problem
    refuse(p, has=("window", "softcap", "sinks"), unpassed=(*UNPASSED, "alibi", "bias", "mask"))
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
                **flash_arguments(one, learnable_sink=one.sinks),
            )
        )

    def shape(result: Any) -> torch.Tensor:
        return by_sequence(p.batch, result[0] if isinstance(result, tuple) else result)

    return Contender(calls, shape)


def vllm_triton(inputs: list[Inputs]) -> Contender:
    """vLLM's Triton kernel, with the scratch memory for split sequences that its backend gives."""
    from vllm.v1.attention.ops.triton_unified_attention import (  # pyright: ignore[reportMissingImports]
        unified_attention,
    )

    p = inputs[0].problem
    refuse(p, has=("window", "softcap", "sinks", "alibi"), unpassed=UNPASSED)
    if p.kv_dtype == "int8":
        raise Unavailable("its int8 caches keep scales beside each head's values")
    if p.kv_scales == "head":
        raise Unavailable("it has one scale for all of K and one for all of V")
    segments = segment_buffers(unified_attention, inputs[0])
    calls = []
    for one in inputs:
        k, v, table = paged(one)
        out = torch.empty_like(tokens(one))
        beside = {"sinks": one.sinks} if p.sinks else {}
        beside |= {"alibi_slopes": one_slope_a_head(one)} if p.alibi else {}
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
            window_size=p.window if p.windowed else (-1, -1),
            block_table=table,
            softcap=one.softcap,
            q_descale=None,
            k_descale=scale_of(one, "k") if p.quantised else None,
            v_descale=scale_of(one, "v") if p.quantised else None,
            **segments,
            **beside,
        )
        calls.append(functools.partial(result_in, out, call))
    return Contender(calls, functools.partial(by_sequence, p.batch))


PEERS: dict[str, Maker] = {
    "cudnn": functools.partial(sdpa, SDPBackend.CUDNN_ATTENTION),
    "flash": functools.partial(sdpa, SDPBackend.FLASH_ATTENTION),
    "math": functools.partial(sdpa, SDPBackend.MATH),
    "flash_attention_2": flash_attention_2,
    "flashinfer": flashinfer,
    "flash_attention_3": flash_attention_3,
    "flash_attention_4": flash_attention_4,
    "vllm_triton": vllm_triton,
}


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
