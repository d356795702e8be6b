"""Varlen: prefill() of sequences, packed or in pages, whose lengths change from step to step.

The layers of a step make calls of one form, which are planned once and then launched again. What
serves them is chosen for the size class that the step is of: there are few of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .arguments import check_output, keys_held, prefill_problem, scale_or_default
from .chunked import check_chunks, chunked_problem
from .installed import tally_for
from .masks import BlockLists, check_lists
from .modifiers import Modifiers, modifiers_of, prefill_plan
from .packed import check_packed, size_class
from .recipe import form_of
from .served import launch_again, launch_first, remember_served, served_before
from .tally import count_call

PACKED_TENSORS = (  # as a plan's recipe has them
    *("q", "k", "v", "out", "lse", "alibi_slopes", "bias", "sinks"),
    *("rng", "cu_seqlens_q", "cu_seqlens_k", "cache_seqlens", "block_table"),
    *("document_ids", "prefix_lens"),
)


def prefill_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    modifiers: Modifiers,
    causal: bool,
    layout: str,
    softmax_scale: float | None,
    out: torch.Tensor | None,
    return_lse: bool,
    check: bool,
    batch_invariant: bool,
    recall: tuple[Callable[..., Any], tuple[Any, ...]],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """prefill() of sequences that `modifiers` say where to find. Raises ProblemError as it does.

    `recall` are prefill() and the values of all its arguments, for the next call like this one.
    """
    paged = modifiers.block_table is not None
    numbers = (causal, layout, softmax_scale, return_lse, batch_invariant, modifiers.kv_layout)
    given = [each if each is None else _modifier_form(each) for each in modifiers]
    form = ("packed", *numbers, modifiers.mask, *map(form_of, (q, k, v, out)), *given)
    served = None if check else served_before(form)
    if served is None:
        pose = chunked_problem if paged else prefill_problem
        problem = pose(q, k, v, causal, layout, modifiers)
        if out is not None:
            check_output("prefill", out, q, problem.head_dim_v)
        if check and modifiers.block_mask is not None:
            table, kv_layout = modifiers.block_table, modifiers.kv_layout
            check_lists(problem, modifiers.block_mask, keys_held(k, table, kv_layout))
        if check and paged:
            check_chunks(problem, q, k, modifiers)
        elif check:
            check_packed(q, k, modifiers)
        tally, device = tally_for(size_class(problem), q, batch_invariant)
    else:
        problem, tally, device = served.tally.problem, served.tally, None
    out = q.new_empty((*q.shape[:-1], problem.head_dim_v)) if out is None else out
    lse = None
    if return_lse:
        lse = torch.empty(_lse_shape(q, problem.layout), dtype=torch.float32, device=q.device)
    tensors = (q, k, v, out, lse, *modifiers.tensors)
    if not len(q):
        count_call(tally)
    elif served is not None:
        launch_again(served, tensors)
        if modifiers.block_mask is None:  # lists are of an object that anybody may change
            remember_served(form, served, tensors, *recall, PACKED_TENSORS, (out, lse))
    elif device is not None:
        scale = scale_or_default("prefill", softmax_scale, problem.head_dim)
        whole, knobs = modifiers_of(problem, modifiers), tally.choice.knobs
        starts = whole.cu_seqlens_k
        if starts is not None and starts is whole.cu_seqlens_q:
            # a recipe tells tensors by what they are, and the next call may give two
            whole = whole._replace(cu_seqlens_k=starts.view(-1))
        first = (q, k, v, out, lse, scale, problem.layout, device.num_sms, knobs)
        make_plan = partial(prefill_plan, tally.choice.module, problem, whole, *first)
        launch_first(form, tally, (q, k, v, out, lse, *whole.tensors), make_plan)
    return (out, lse) if lse is not None else out


def _lse_shape(q: torch.Tensor, layout: str) -> tuple[int, ...]:
    """(num_heads, total_q), or (batch, num_heads, seqlen_q)."""
    axes = {"thd": (1, 0), "bshd": (0, 2, 1), "bhsd": (0, 1, 2)}[layout]
    return tuple(q.shape[axis] for axis in axes)


def _modifier_form(given: Any) -> Any:
    """What a plan may know of a modifier: its values are arguments, but a window's sides."""
    if isinstance(given, BlockLists):
        return (given.BLOCK_SIZE, given.rule, *map(form_of, given.tensors))
    return given if isinstance(given, tuple) else form_of(given)
