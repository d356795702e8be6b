"""The gradients of the operators prefill and prefill_masked, by operators of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._library.autograd import Info, make_autograd_impl

from .masks import BlockLists, QueryLists
from .modifiers import Modifiers
from .schemas import MASKS_LEFT_OUT, PREFILL_LEFT_OUT
from .training import Training, prefill_gradients, training_of
from .transposed import with_query_lists

# What the dispatcher has in store for plain tensors of a device: autograd, then its kernel.
PLAIN_KEYS = (("CUDA", "AutogradCUDA"), ("CPU", "AutogradCPU"))
FORWARD_TENSORS = 7  # q, k, v, out, lse, dout and dlse


def differentiable(
    prefill: Any, gradients: Any, run_prefill: Callable[..., Any], left_out: Mapping[str, Any]
) -> Callable[..., Any]:
    """What autograd calls for the operator `prefill`, whose backward the operator `gradients` is.

    As `torch.library.register_autograd` has it, but for calls in which no mode or subclass of
    tensors has a say: these run at once what the operator runs, which sees to its gradients itself.
    To dispatch them again takes as long as all the rest. `left_out` are the operator's options.
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
        asked = dict(zip((*"qkv", *left_out), ctx.needs_input_grad))  # of those given
        of_bias, of_sinks = asked.get("bias", False), asked.get("sinks", False)
        read = (*inputs[:3], out, lse, dout, dlse, of_bias, of_sinks)
        *found, dbias, dsinks = gradients(*read, *inputs[3:])
        of_modifiers = {"bias": dbias if of_bias else None, "sinks": dsinks if of_sinks else None}
        return *found, *(of_modifiers.get(name) for name in left_out)

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


def run_gradients(*given: Any) -> tuple[torch.Tensor, ...]:
    """What the operator of gradients runs; of what is not asked for there is nothing."""
    return _run_gradients(given, PREFILL_LEFT_OUT)


def run_masked_gradients(*given: Any) -> tuple[torch.Tensor, ...]:
    """The same under masks beyond windows."""
    return _run_gradients(given, MASKS_LEFT_OUT)


def gradient_results(*given: Any) -> tuple[torch.Tensor, ...]:
    """What the operator of gradients gives, without values."""
    return _gradient_results(given, PREFILL_LEFT_OUT)


def masked_gradient_results(*given: Any) -> tuple[torch.Tensor, ...]:
    """The same under masks beyond windows."""
    return _gradient_results(given, MASKS_LEFT_OUT)


def blocks_given(given: Mapping[str, Any]) -> BlockLists | None:
    """The block mask among the options of an operator, None where there is none."""
    if given["kv_num_blocks"] is None:
        return None
    lists = (given[name] for name in BlockLists._fields[:4])
    sizes = (given["mask_block_q"], given["mask_block_k"])
    queries = QueryLists(*(given.get(name) for name in QueryLists._fields))
    return BlockLists(*lists, BLOCK_SIZE=sizes, queries=queries)


def without_training(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]
) -> dict[str, Any]:
    """The options of a forward's operator without `training`, which is none of the function's.

    Raises ProblemError where it says that gradients will be asked for and no backward serves them.
    """
    if options.pop("training", False):
        _training_asked(q, k, v, {**PREFILL_LEFT_OUT, **options})
    return options


def _training_asked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Mapping[str, Any]
) -> tuple[Training, Modifiers]:
    modifiers = _modifiers_given(options)
    call = (options["causal"], options["layout"], modifiers, options["softmax_scale"])
    return training_of(q, k, v, *call, options["deterministic"]), modifiers


def _run_gradients(given: tuple[Any, ...], left_out: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    q, k, v = given[:3]
    of_bias, of_sinks, *values = given[FORWARD_TENSORS:]
    options = {**left_out, **dict(zip(left_out, values))}
    bias, sinks = options["bias"], options["sinks"]
    training, modifiers = _training_asked(q, k, v, options)
    if modifiers.block_mask is not None:
        listed = with_query_lists(training.problem, modifiers.block_mask)
        modifiers = modifiers._replace(block_mask=listed)
    dbias = bias.new_empty(bias.shape) if of_bias else None
    dsinks = sinks.new_empty(sinks.shape) if of_sinks else None
    found = prefill_gradients(training, modifiers, dbias, dsinks, *given[:FORWARD_TENSORS])
    return *found, *(q.new_empty(0) if each is None else each for each in (dbias, dsinks))


def _modifiers_given(options: Mapping[str, Any]) -> Modifiers:
    names = (*Modifiers._fields[1:9], "dropout_p", "rng")
    if "mask" in options:
        names += ("document_ids", "prefix_lens", "mask", "density")
    modifiers = Modifiers(
        (options["window_left"], options["window_right"]), **{name: options[name] for name in names}
    )
    if "mask" not in options:
        return modifiers
    return modifiers._replace(block_mask=blocks_given(options))


def _gradient_results(
    given: tuple[Any, ...], left_out: Mapping[str, Any]
) -> tuple[torch.Tensor, ...]:
    of_bias, of_sinks, *values = given[FORWARD_TENSORS:]
    options = dict(zip(left_out, values))
    asked = (options["bias"] if of_bias else None, options["sinks"] if of_sinks else None)
    found = [each.new_empty(each.shape) for each in given[:3]]
    found += [given[0].new_empty(0) if t is None else t.new_empty(t.shape) for t in asked]
    return tuple(found)
