"""The gradients of the operator prefill, by an operator of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._library.autograd import Info, make_autograd_impl

from .modifiers import Modifiers
from .schemas import PREFILL_LEFT_OUT
from .training import prefill_gradients, training_of

# What the dispatcher has in store for plain tensors of a device: autograd, then its kernel.
PLAIN_KEYS = (("CUDA", "AutogradCUDA"), ("CPU", "AutogradCPU"))


def differentiable(
    prefill: Any, gradients: Any, run_prefill: Callable[..., Any]
) -> Callable[..., Any]:
    """What autograd calls for the operator `prefill`, whose backward the operator `gradients` is.

    As `torch.library.register_autograd` has it, but for calls in which no mode or subclass of
    tensors has a say: these run at once what the operator runs, which sees to its gradients itself.
    To dispatch them again takes as long as all the rest.
    """

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        # of inputs that are left out there are the defaults
        tensors = [each if isinstance(each, torch.Tensor) else None for each in inputs]
        ctx.save_for_backward(*tensors, *output)
        ctx.others = tuple(None if isinstance(each, torch.Tensor) else each for each in inputs)

    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:
        *tensors, out, lse = ctx.saved_tensors
        inputs = [
            other if tensor is None else tensor
            for tensor, other in zip(tensors, ctx.others, strict=True)
        ]
        asked = dict(zip((*"qkv", *PREFILL_LEFT_OUT), ctx.needs_input_grad))  # of those given
        of_bias, of_sinks = asked.get("bias", False), asked.get("sinks", False)
        read = (*inputs[:3], out, lse, dout, dlse, of_bias, of_sinks)
        *found, dbias, dsinks = gradients(*read, *inputs[3:])
        of_modifiers = {"bias": dbias if of_bias else None, "sinks": dsinks if of_sinks else None}
        return *found, *(of_modifiers.get(name) for name in PREFILL_LEFT_OUT)

    dispatched = make_autograd_impl(prefill, Info(backward, keep))
    key_set, keys = torch._C.DispatchKeySet, torch._C.DispatchKey
    plain = {
        key_set(getattr(keys, device)).add(getattr(keys, autograd)).raw_repr()
        for device, autograd in PLAIN_KEYS
    }

    def run(keyset: Any, *given: Any) -> Any:
        if keyset.raw_repr() in plain:
            return run_prefill(*given)
        return dispatched(keyset, *given)

    return run


def run_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    of_bias: bool,
    of_sinks: bool,
    *options: Any,
) -> tuple[torch.Tensor, ...]:
    """What the operator of gradients runs; of what is not asked for there is nothing."""
    given = PREFILL_LEFT_OUT | dict(zip(PREFILL_LEFT_OUT, options))
    window = (given["window_left"], given["window_right"])
    names = (*Modifiers._fields[1:9], "dropout_p", "rng")
    modifiers = Modifiers(window, **{name: given[name] for name in names})
    call = (given["causal"], given["layout"], modifiers, given["softmax_scale"])
    training = training_of(q, k, v, *call, given["deterministic"])
    dbias = given["bias"].new_empty(given["bias"].shape) if of_bias else None
    dsinks = given["sinks"].new_empty(given["sinks"].shape) if of_sinks else None
    forward = (q, k, v, out, lse, dout, dlse)
    found = prefill_gradients(training, modifiers, dbias, dsinks, *forward)
    return *found, *(q.new_empty(0) if each is None else each for each in (dbias, dsinks))


def gradient_results(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, ...]:
    """The same without values."""
    *_, of_bias, of_sinks = rest[:6]
    given = dict(zip(PREFILL_LEFT_OUT, rest[6:]))
    found = [each.new_empty(each.shape) for each in (q, k, v)]
    for asked, name in ((of_bias, "bias"), (of_sinks, "sinks")):
        found.append(given[name].new_empty(given[name].shape) if asked else q.new_empty(0))
    return tuple(found)
