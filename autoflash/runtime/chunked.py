"""Chunked: prefill() of queries over keys in pages, checked, and the problem that it poses."""

from __future__ import annotations

import torch

from .arguments import (
    ARGUMENT_DTYPES,
    AXES,
    cached_sizes,
    check_cache_entries,
    check_tensors,
    most_keys,
)
from .masks import mask_fields
from .modifiers import Modifiers, modifier_fields
from .packed import check_packed, packed_queries
from .problem import LAYOUTS, Problem, ProblemError, reached_window


def chunked_problem(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    layout: str,
    given: Modifiers,
) -> Problem:
    """The problem of q, as `layout` has it or packed, over the caches k and v.

    Without `max_seqlen_k` the table's width tells how many keys there may be. Raises ProblemError
    naming the argument that does not fit.
    """
    if given.block_table is None or given.cache_seqlens is None:
        raise ProblemError("prefill: keys in pages need a block_table and cache_seqlens")
    if given.cu_seqlens_k is not None:
        raise ProblemError(
            "prefill: cu_seqlens_k is of packed keys, cache_seqlens of those in pages"
        )
    if layout not in LAYOUTS:
        raise ProblemError(f"prefill: layout {layout!r} is none of {', '.join(LAYOUTS)}")
    if given.cu_seqlens_q is not None or given.max_seqlen_q is not None:
        if layout == "bhsd":
            raise ProblemError("prefill: layout 'bhsd' has an axis of sequences, packed ones none")
        layout = "thd"
    axes = AXES[layout]
    check_tensors("prefill", q, len(axes), of_others=4, k=k, v=v)
    heads, tokens = axes.index("num_kv_heads"), axes.index("seqlen_k")
    if layout == "thd":
        sizes = packed_queries(q, given)
    else:
        sizes = {"batch": q.shape[0], "seqlen_q": q.shape[tokens]}
    cached = (given.cache_seqlens, given.block_table, given.kv_layout)
    kv_heads, page_size, capacity = cached_sizes(
        "prefill", {"k": k, "v": v}, q, sizes["batch"], *cached
    )
    most = most_keys("prefill", given.max_seqlen_k, capacity)
    whole = (sizes["batch"], q.shape[heads], sizes["seqlen_q"], capacity)
    problem = Problem(
        op="prefill",
        dtype=ARGUMENT_DTYPES[q.dtype],
        num_heads=q.shape[heads],
        num_kv_heads=kv_heads,
        head_dim=q.shape[-1],
        head_dim_v=v.shape[-1],
        seqlen_k=most,
        causal=causal,
        page_size=page_size,
        layout=layout,
        kv_layout=given.kv_layout,
        lengths="equal" if sizes["batch"] == 1 else "ragged",  # as far as a host knows
        **sizes,
        **modifier_fields("prefill", given, q, *whole),
        **mask_fields("prefill", q, *whole, causal, given.masks),
    )
    return reached_window(problem)


def check_chunks(problem: Problem, q: torch.Tensor, k: torch.Tensor, given: Modifiers) -> None:
    """Raise ProblemError for lengths and pages that are not there. Waits for the device."""
    assert given.cache_seqlens is not None
    check_cache_entries(problem, k, given.cache_seqlens, given.block_table)
    if problem.varlen:
        check_packed(q, k, given)
