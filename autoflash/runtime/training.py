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
from .modifiers import Modifiers
from .problem import Problem, ProblemError
from .recipe import form_of
from .served import launch_again, launch_first, served_before

Attention = Callable[..., Any]  # q, k and v to (out, lse)


class Training(NamedTuple):
    """What the backward of a call needs beside its tensors. The problem is the backward's."""

    problem: Problem
    softmax_scale: float


def asks_gradients(*tensors: torch.Tensor) -> bool:
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of `attention`, both differentiable once with respect to q, k and v.

    Raises ProblemError where no backward serves the call.
    """
    with torch.no_grad():  # under which nobody refuses a tensor that requires grad
        forward = prefill_problem(q, k, v, causal, layout, modifiers)
    problem = replace(forward, op="backward")
    reason = backward_unsupported(problem, device_for(q))
    if reason:
        raise ProblemError(f"prefill: no gradient: {reason}; call under torch.no_grad()")
    scale = scale_or_default("prefill", softmax_scale, problem.head_dim)
    return DifferentiablePrefill.apply(q, k, v, attention, Training(problem, scale))


class DifferentiablePrefill(torch.autograd.Function):
    """The forward keeps its tensors, `out` and `lse`; no matrix of scores is ever kept or made."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attention: Attention,
        training: Training,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = attention(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.training = training
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        dout, dlse = grad_outputs
        if dout is None and dlse is None:
            return None, None, None, None, None
        q, k, v, out, lse = ctx.saved_tensors
        return *prefill_gradients(ctx.training, q, k, v, out, lse, dout, dlse), None, None


def prefill_gradients(
    training: Training,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv, contiguous, of the gradients of `out` and `lse`; None is zero."""
    dout = torch.zeros_like(out) if dout is None else dout
    if dout.stride(-1) != 1:  # as that of a sum, which is one number everywhere
        dout = dout.contiguous()
    if dlse is not None:
        dlse = dlse.contiguous()
    gradients = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    given = (q, k, v, out, lse, dout, dlse)
    tensors = (*given, *gradients)
    form = ("backward", *training, *map(form_of, given))
    served = served_before(form)
    if served is not None:
        launch_again(served, tensors)
        return gradients
    problem, scale = training
    tally, device = tally_for(problem, q)
    numbers = (scale, problem.layout, device.num_sms, tally.choice.knobs)
    launch_first(form, tally, tensors, partial(tally.choice.module.plan, *tensors, *numbers))
    return gradients
