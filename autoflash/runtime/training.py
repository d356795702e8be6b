"""Training: prefill() with gradients for autograd, by the backward that the tables carry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from .arguments import prefill_problem, scale_or_default
from .backward_validity import backward_unsupported
from .installed import device_for, installed, tally_for
from .masks import BlockLists, QueryLists
from .modifiers import Modifiers, backward_plan, modifiers_of
from .packed import size_class
from .problem import Problem, ProblemError
from .recipe import form_of
from .served import launch_again, launch_first, launch_plan, served_before, workspaces_on
from .tally import count_call
from .transposed import with_query_lists

Attention = Callable[..., Any]  # q, k, v, bias and sinks to (out, lse)
# What a modifier has of tensors, but for a bias and sinks, which have gradients.
SAVED_MODIFIERS = (
    *("alibi_slopes", "rng", "cu_seqlens_q", "cu_seqlens_k"),
    *("document_ids", "prefix_lens"),
)
WITHOUT_TENSORS = dict.fromkeys(("bias", "sinks", "block_mask", *SAVED_MODIFIERS))


class Training(NamedTuple):
    """What the backward of a call needs beside its tensors. The problem is the backward's."""

    problem: Problem
    softmax_scale: float
    numbers: Modifiers  # without tensors


def asks_gradients(*tensors: torch.Tensor | None) -> bool:
    """Whether autograd wants gradients of these tensors and the tables carry a backward."""
    wanted = torch.is_grad_enabled() and any(
        isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors
    )
    return wanted and ("backward",) in installed().tables.names


def prefill_with_gradients(
    attention: Attention,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    layout: str,
    modifiers: Modifiers,
    softmax_scale: float | None,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of `attention`, differentiable once with respect to q, k, v, bias and sinks.

    Raises ProblemError where no backward serves the call.
    """
    refuse_slopes(modifiers.alibi_slopes)
    training = training_of(q, k, v, causal, layout, modifiers, softmax_scale, deterministic)
    if modifiers.block_mask is not None:
        listed = with_query_lists(training.problem, modifiers.block_mask)
        modifiers = modifiers._replace(block_mask=listed)
    differentiated = (q, k, v, modifiers.bias, modifiers.sinks)
    return DifferentiablePrefill.apply(*differentiated, modifiers, attention, training)


def refuse_slopes(slopes: torch.Tensor | None) -> None:
    """Raise ProblemError for slopes that ask for a gradient."""
    if slopes is not None and slopes.requires_grad:
        raise ProblemError("prefill: alibi_slopes requires grad and has no gradient; detach it")


def training_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    layout: str,
    modifiers: Modifiers,
    softmax_scale: float | None,
    deterministic: bool,
) -> Training:
    """What the backward of this call needs. Raises ProblemError where none serves it."""
    with torch.no_grad():  # under which nobody refuses a tensor that requires grad
        forward = prefill_problem(q, k, v, causal, layout, modifiers)
    problem = replace(forward, op="backward", deterministic=deterministic)
    reason = backward_unsupported(problem, device_for(q))
    if reason:
        raise ProblemError(f"prefill: no gradient: {reason}; call under torch.no_grad()")
    packed_bias = problem.varlen and problem.bias
    if problem.masks or packed_bias or problem.head_dim_v != problem.head_dim:
        # what was not tuned has no text: told now, not in the backward
        tally_for(size_class(problem) if problem.varlen else problem, q)
    scale = scale_or_default("prefill", softmax_scale, problem.head_dim)
    return Training(problem, scale, modifiers._replace(**WITHOUT_TENSORS))


class DifferentiablePrefill(torch.autograd.Function):
    """The forward keeps its tensors, `out` and `lse`; no matrix of scores is ever kept or made."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None,
        sinks: torch.Tensor | None,
        modifiers: Modifiers,
        attention: Attention,
        training: Training,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = attention(q, k, v)
        saved = [getattr(modifiers, name) for name in SAVED_MODIFIERS]
        lists = modifiers.block_mask
        if lists is not None:
            saved += [*lists.tensors, *lists.query_tensors]
        ctx.save_for_backward(q, k, v, out, lse, bias, sinks, *saved)
        ctx.training = training
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        dout, dlse = grad_outputs
        if dout is None and dlse is None:
            return (None,) * 8
        q, k, v, out, lse, bias, sinks, *saved = ctx.saved_tensors
        of_modifiers = dict(zip(SAVED_MODIFIERS, saved), bias=bias, sinks=sinks)
        if lists := saved[len(SAVED_MODIFIERS) :]:
            p = ctx.training.problem
            sizes, queries = (p.mask_block_q, p.mask_block_k), QueryLists(*lists[4:])
            of_modifiers["block_mask"] = BlockLists(*lists[:4], BLOCK_SIZE=sizes, queries=queries)
        modifiers = ctx.training.numbers._replace(**of_modifiers)
        # nothing is computed for a bias or sinks of which nobody asks a gradient
        dbias = bias.new_empty(bias.shape) if ctx.needs_input_grad[3] else None
        dsinks = sinks.new_empty(sinks.shape) if ctx.needs_input_grad[4] else None
        given = (q, k, v, out, lse, dout, dlse)
        gradients = prefill_gradients(ctx.training, modifiers, dbias, dsinks, *given)
        return *gradients, dbias, dsinks, None, None, None


def prefill_gradients(
    training: Training,
    modifiers: Modifiers,
    dbias: torch.Tensor | None,
    dsinks: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv, contiguous, of the gradients of `out` and `lse`; None is zero.

    Where `dbias`, contiguous and of the bias's shape, and `dsinks` are given they are written.
    """
    dout = torch.zeros_like(out) if dout is None else dout
    if dout.stride(-1) != 1:  # as that of a sum, which is one number everywhere
        dout = dout.contiguous()
    if dlse is not None:
        dlse = dlse.contiguous()
    given = (q, k, v, out, lse, dout, dlse)
    problem, scale, numbers = training
    whole = modifiers_of(problem, modifiers)
    of_modifiers = (None if dbias is None else as_four_axes(dbias), dsinks)
    if problem.varlen:  # of tokens past the last sequence nothing is written
        gradients = q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
        tally, device = tally_for(size_class(problem), q)
        tail = (scale, problem.layout, device.num_sms, tally.choice.knobs, workspaces_on(q))
        plan = backward_plan(
            tally.choice.module, problem, whole, of_modifiers, *given, *gradients, *tail
        )
        launch_plan(plan, q)
        count_call(tally)
        return gradients
    gradients = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    beside = (dbias, dsinks, *modifiers.tensors, *modifiers.query_tensors)
    form = ("backward", problem, scale, numbers, *map(form_of, (*given, *beside)))
    served = served_before(form)
    if served is not None:
        launch_again(served, (*given, *gradients, *beside))
        return gradients
    tally, device = tally_for(problem, q)
    tensors = (*given, *gradients, *of_modifiers, *whole.tensors, *whole.query_tensors)
    tail = (scale, problem.layout, device.num_sms, tally.choice.knobs)
    planned = (tally.choice.module, problem, whole, of_modifiers, *given, *gradients, *tail)
    launch_first(form, tally, tensors, partial(backward_plan, *planned))
    return gradients


def as_four_axes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor that broadcasts to scores, as a view with all four axes of theirs."""
    return tensor.view((1,) * (4 - tensor.dim()) + tensor.shape)
