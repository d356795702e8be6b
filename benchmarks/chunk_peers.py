"""Prefill over pages by others, and by ours of the same keys where they lie in order."""

import functools
from dataclasses import replace
from types import ModuleType

import torch

from autoflash.inputs import Inputs
from autoflash.peers import ours
from autoflash.peers.contender import Contender, Unavailable


def flash_attention_3(inputs: list[Inputs]) -> Contender:
    """FlashAttention-3's varlen call over pages, as vLLM makes it."""
    from vllm.vllm_flash_attn.flash_attn_interface import (  # pyright: ignore[reportMissingImports]
        flash_attn_varlen_func,
    )

    p = inputs[0].problem
    if p.kv_layout != "nhd" or p.layout == "bhsd" or p.modifiers:
        raise Unavailable("it is asked about pages of nhd and queries in order, unmodified")
    left, right = p.window

    def call(one: Inputs, q: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        out = flash_attn_varlen_func(
            q,
            one.k,
            one.v,
            max_seqlen_q=p.seqlen_q,
            cu_seqlens_q=starts,
            max_seqlen_k=p.seqlen_k,
            seqused_k=one.cache_seqlens,
            block_table=one.block_table,
            causal=p.causal or right == 0,
            window_size=[left, right] if p.windowed else [-1, -1],
            fa_version=3,
        )
        return out.view(one.q.shape)

    calls = [functools.partial(call, one, *packed_queries(one)) for one in inputs]
    return Contender(list(calls))


def in_order(module: ModuleType, inputs: list[Inputs]) -> Contender:
    """The module's prefill() of the same queries and keys, packed one after the other."""
    return ours.prefill(module, [packed(one) for one in inputs])


def packed(one: Inputs) -> Inputs:
    """The same sequences without pages."""
    p = one.problem
    gathered = [one.sequence(b)[1:] for b in range(p.batch)]
    k, v = (torch.cat([each.transpose(0, 1) for each in tensors]) for tensors in zip(*gathered))
    q, starts = packed_queries(one)
    assert one.cache_seqlens is not None
    ends = one.cache_seqlens.cumsum(0, dtype=torch.int32)
    tables = {"block_table": None, "cache_seqlens": None}
    tables |= {"cu_seqlens_q": starts, "cu_seqlens_k": torch.nn.functional.pad(ends, (1, 0))}
    problem = replace(p, page_size=0, layout="thd", pages="")
    return replace(one, problem=problem, q=q, k=k, v=v, **tables)


def packed_queries(one: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """(total_q, num_heads, head_dim), and where each sequence's begin."""
    p = one.problem
    if one.cu_seqlens_q is not None:
        return one.q, one.cu_seqlens_q
    numbers = torch.arange(p.batch + 1, dtype=torch.int32, device=one.q.device)
    return one.q.flatten(0, 1), numbers * p.seqlen_q
