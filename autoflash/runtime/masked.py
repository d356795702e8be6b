"""Masked: prefill() under blocks, documents, prefixes and rules, served again by its recipe."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from .arguments import check_output, prefill_problem, scale_or_default
from .installed import tally_for
from .masks import Masks, block_lists, check_lists
from .modifiers import Modifiers, modifiers_of, prefill_plan
from .recipe import form_of
from .served import launch_again, launch_first, outputs_of, served_before


def with_masks(
    given: Modifiers, block_mask: Any, *others: torch.Tensor | str | int | None
) -> Modifiers:
    """The modifiers with masks too. Raises ProblemError for a `block_mask` that is none."""
    lists = None if block_mask is None else block_lists(block_mask)
    return given._replace(**dict(zip(Masks._fields, (lists, *others), strict=True)))


def prefill_masked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    given: Modifiers,
    causal: bool,
    layout: str,
    softmax_scale: float | None,
    out: torch.Tensor | None,
    return_lse: bool,
    check: bool,
) -> Any:
    """prefill() of masks beyond causal and windows. Raises ProblemError as it does."""
    lists = given.block_mask
    told = (
        given.mask,
        given.density,
        given.dropout_p,
        lists and lists.BLOCK_SIZE,
        lists and bool(lists.rule),
    )
    key = ("masked", causal, layout, return_lse, softmax_scale, given.softcap, *given.window, *told)
    tensors = (q, k, v, out, *given.tensors)
    form = (key, *(each is None for each in given), *map(form_of, tensors))
    served = None if check else served_before(form)
    if served is not None:
        out, lse = outputs_of(q, served.tally.problem, out, return_lse)
        launch_again(served, (q, k, v, out, lse, *given.tensors))
        return (out, lse) if lse is not None else out
    problem = prefill_problem(q, k, v, causal, layout, given)
    if out is not None:
        check_output("prefill", out, q, problem.head_dim_v)
    if check and given.block_mask is not None:
        check_lists(problem, given.block_mask, problem.seqlen_k)
    scale = scale_or_default("prefill", softmax_scale, problem.head_dim)
    tally, device = tally_for(problem, q)
    out, lse = outputs_of(q, problem, out, return_lse)
    modifiers = modifiers_of(problem, given)
    first = (q, k, v, out, lse, scale, layout, device.num_sms, tally.choice.knobs)
    make_plan = partial(prefill_plan, tally.choice.module, problem, modifiers, *first)
    launch_first(form, tally, (q, k, v, out, lse, *modifiers.tensors), make_plan)
    return (out, lse) if lse is not None else out
