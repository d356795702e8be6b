"""Caches in the forms that peers read: pages, tokens one after another, starts, scales."""

import torch
import torch.nn.functional as F

from autoflash.inputs import Inputs
from autoflash.peers.contender import Unavailable

PAGE_OF_CONTIGUOUS = 16  # as which peers read a cache without pages


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


def lengths_of(one: Inputs) -> torch.Tensor:
    """The valid tokens of each sequence: int32 (batch,)."""
    assert one.cache_seqlens is not None, "inputs of decode have lengths"
    return one.cache_seqlens


def query_starts(one: Inputs) -> torch.Tensor:
    return starts(torch.full_like(lengths_of(one), one.problem.seqlen_q))


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
