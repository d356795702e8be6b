"""Warm: the kernels of what was tuned, compiled and loaded before the first call needs them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .append import append_cache
from .arguments import ARGUMENT_DTYPES
from .device import Device, device_at
from .installed import installed
from .launch import Launch, compile_plan, interpreted
from .masks import BlockLists
from .match import MATCH_EXACT_FIELDS
from .modifiers import Modifiers, backward_plan, decode_plan, modifiers_of, prefill_plan
from .problem import CHOSEN, LENGTHS, PAGES, Problem
from .recall import recall_module
from .scales import QUANTISED_ARGUMENTS, cache_form
from .selection import Row

WARM_DTYPES = {name: dtype for dtype, name in (ARGUMENT_DTYPES | QUANTISED_ARGUMENTS).items()}


def warmup() -> int:
    """Compile what was tuned for the current GPU, or take it from bundles, and load it.

    Afterwards a call like a tuned one, with `return_lse` or without, compiles nothing: its tensors
    contiguous and aligned to 16 bytes, scales of a whole cache numbers. Gives how many kernels are
    loaded; without bundles that takes seconds each.
    """
    if interpreted():
        return 0
    recall_module()
    device = device_at(torch.cuda.current_device())
    kernels = [kernel for plan in warm_plans(device) for kernel in compile_plan(plan)]
    loaded = [kernel for kernel in kernels if kernel.run is not None]  # which loads it
    return len({kernel.hash for kernel in loaded})


def warm_plans(device: Device) -> Iterator[list[Launch]]:
    """What calls like the tuned ones would launch on the device, on tensors without memory."""
    for table in installed().tables.gpus:
        if table.device.identity == device.identity:
            for row in table.rows:
                problem = tuned_problem(row)
                for with_lse in (False, True) if problem.op != "backward" else (True,):
                    yield _warm_plan(problem, device, with_lse)
                if problem.op == "decode":
                    yield _append_plan(problem)


def tuned_problem(row: Row) -> Problem:
    """The problem that the row was tuned for, but for what plays no part in its kernels."""
    exact = dict(zip(MATCH_EXACT_FIELDS, row.key))
    group_size, _, _, windowed = row.key[len(MATCH_EXACT_FIELDS) :]
    sizes = row.sizes
    sides = [
        -1 if not windowed or side >= sizes.seqlen_k else side
        for side in (sizes.keys_before, sizes.keys_after)
    ]
    return Problem(
        **exact,
        batch=sizes.kv_heads // row.num_kv_heads,
        num_heads=group_size * row.num_kv_heads,
        num_kv_heads=row.num_kv_heads,
        seqlen_q=sizes.seqlen_q,
        seqlen_k=sizes.seqlen_k,
        page_size=sizes.page_size,
        lengths=LENGTHS[sizes.lengths],
        pages=PAGES[sizes.pages],
        window_left=sides[0],
        window_right=sides[1],
        density=sizes.density,
    )


def _meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _warm_workspace(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return _meta(*shape, dtype=dtype)


def _warm_plan(p: Problem, device: Device, with_lse: bool) -> list[Launch]:
    choice = installed().choose(p, device)
    module, knobs = choice.module, choice.knobs
    dtype, scale = WARM_DTYPES[p.dtype], p.head_dim**-0.5
    if p.op == "decode":
        q = _meta(p.batch, p.seqlen_q, p.num_heads, p.head_dim, dtype=dtype)
        read = (*map(cache_form, _caches(p)), *_scales(p))
        lengths = _meta(p.batch, dtype=torch.int32)
        out = _meta(*q.shape[:-1], p.head_dim_v, dtype=dtype)
        results = (out, _lse(p) if with_lse else None)
        numbers = (scale, p.kv_layout, p.seqlen_k, device.num_sms, knobs)
        given = (q, *read, lengths, _table(p), *results, *numbers, _warm_workspace)
        return decode_plan(module, p, modifiers_of(p, _modifiers(p)), *given)
    q, k, v = (
        _meta(*_prefill_shape(p, tokens, heads, width), dtype=dtype)
        for tokens, heads, width in (
            (p.seqlen_q, p.num_heads, p.head_dim),
            (p.seqlen_k, p.num_kv_heads, p.head_dim),
            (p.seqlen_k, p.num_kv_heads, p.head_dim_v),
        )
    )
    if p.paged:
        k, v = _caches(p)
    out = _meta(*q.shape[:-1], p.head_dim_v, dtype=dtype)
    lse = _lse(p) if with_lse else None
    modifiers = modifiers_of(p, _modifiers(p))
    tail = (scale, p.layout, device.num_sms, knobs, _warm_workspace)
    if p.op == "backward":
        gradients = (torch.empty_like(each) for each in (q, k, v))
        given = (q, k, v, out, lse, torch.empty_like(out), None, *gradients, *tail)
        return backward_plan(module, p, modifiers, (None, None), *given)
    return prefill_plan(module, p, modifiers, q, k, v, out, lse, *tail)


def _append_plan(p: Problem) -> list[Launch]:
    switches = ("quantised",) if p.quantised else ()
    switches += ("token_scales",) if p.kv_scales == "token" else ()
    dtype = WARM_DTYPES[p.dtype]
    new = [
        _meta(p.batch, p.num_kv_heads, width, dtype=dtype) for width in (p.head_dim, p.head_dim_v)
    ]
    caches = map(append_cache, _caches(p))
    scales = [
        each[0] if isinstance(each, torch.Tensor) and each.dim() == 2 else each
        for each in _scales(p)
    ]
    slots = _meta(p.batch, dtype=torch.int64)
    plan = installed().module("append_kv", switches).plan
    return plan(*new, *caches, *scales, slots, p.kv_layout)


def _prefill_shape(p: Problem, tokens: int, heads: int, width: int) -> tuple[int, ...]:
    if p.varlen:
        return p.batch * tokens, heads, width
    return (
        (p.batch, tokens, heads, width) if p.layout == "bshd" else (p.batch, heads, tokens, width)
    )


def _lse(p: Problem) -> torch.Tensor:
    shape = (p.num_heads, p.batch * p.seqlen_q) if p.varlen else (p.batch, p.num_heads, p.seqlen_q)
    return _meta(*shape, dtype=torch.float32)


def _modifiers(p: Problem) -> Modifiers:
    numbers = Modifiers(p.window, 1.0 if p.softcap else 0.0)
    dtype = WARM_DTYPES[p.dtype]
    heads, keys = p.num_heads, _pages(p) * p.page_size if p.paged else p.seqlen_k
    rows = (p.batch if p.op == "decode" else 1, p.num_heads, p.seqlen_q, keys)
    made: dict[str, Any] = {
        "alibi_slopes": _meta(heads, dtype=torch.float32) if p.alibi else None,
        "bias": _meta(*rows, dtype=dtype) if p.bias else None,
        "sinks": _meta(heads, dtype=torch.float32) if p.sinks else None,
    }
    if p.dropout:
        made |= {"dropout_p": 0.5, "rng": _meta(2, dtype=torch.int64)}
    if p.varlen:
        packed = ("cu_seqlens_q",) if p.paged else ("cu_seqlens_q", "cu_seqlens_k")
        made |= {name: _meta(p.batch + 1, dtype=torch.int32) for name in packed}
        made |= {"max_seqlen_q": p.seqlen_q, "max_seqlen_k": p.seqlen_k}
    if p.pages == CHOSEN:
        made["page_positions"] = _table(p)
    elif p.paged and p.op != "decode":
        made |= {"cache_seqlens": _meta(p.batch, dtype=torch.int32), "block_table": _table(p)}
        made |= {"kv_layout": p.kv_layout, "max_seqlen_k": p.seqlen_k}
    return numbers._replace(**made, **_masks(p, keys))


def _masks(p: Problem, keys: int) -> dict[str, Any]:
    """Those of the problem, with ids of `keys` and lists of as many blocks as there may be."""
    if p.masked_by == "documents":
        return {"document_ids": _meta(p.batch, keys, dtype=torch.int32)}
    if p.masked_by == "prefix":
        return {"prefix_lens": _meta(p.batch, dtype=torch.int32)}
    if p.masked_by != "blocks":
        return {}
    rows, columns = -(-p.seqlen_q // p.mask_block_q), -(-p.seqlen_k // p.mask_block_k)
    counts = _meta(p.batch, p.num_heads, rows, dtype=torch.int32)
    indices = _meta(p.batch, p.num_heads, rows, columns, dtype=torch.int32)
    lists = (counts, indices, torch.empty_like(counts), torch.empty_like(indices))
    return {"block_mask": BlockLists(*lists, (p.mask_block_q, p.mask_block_k))}


def _pages(p: Problem) -> int:
    """How many pages the longest sequence takes."""
    return max(1, -(-p.seqlen_k // p.page_size))


def _caches(p: Problem) -> list[torch.Tensor]:
    slots = (p.batch * _pages(p), p.page_size) if p.paged else (p.batch, max(1, p.seqlen_k))
    rows = (
        (*slots, p.num_kv_heads) if p.kv_layout == "nhd" else (slots[0], p.num_kv_heads, slots[1])
    )
    return [
        _meta(*rows, width, dtype=WARM_DTYPES[p.kv_dtype]) for width in (p.head_dim, p.head_dim_v)
    ]


def _table(p: Problem) -> torch.Tensor | None:
    return _meta(p.batch, _pages(p), dtype=torch.int32) if p.paged else None


def _scales(p: Problem) -> list[Any]:
    """Both scales as plans take them."""
    if not p.quantised:
        return []
    if p.kv_scales == "tensor":
        return [1.0, 1.0]
    if p.kv_scales == "head":
        return [_meta(p.num_kv_heads, dtype=torch.float32).expand(p.batch, -1) for _ in "kv"]
    return [_meta(*cache.shape[:3], dtype=torch.float32) for cache in _caches(p)]
