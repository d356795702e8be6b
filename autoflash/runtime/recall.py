"""Recall: calls that repeat earlier ones are told and launched again in C, in a microsecond or two.

What a call remembers are its values, how its tensors are told from others, and its bound launches.
The C is compiled once, as triton compiles its launchers, and lies in triton's cache; without a
compiler nothing is recalled, and calls are found by their form.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from inspect import signature
from typing import Any

import torch
from triton.runtime.build import compile_module_from_src

from .bound import BoundRecipe
from .cuda_launch import CudaLaunchConfig, cuda_context, cuda_launcher, function_address
from .recall_text import RECALL_SOURCE
from .tally import Tally, last_tally

# Where a pointer comes from that is of no argument, as the C text has them.
NEW_OUT, NEW_LSE, WORKSPACE = -1, -2, -3
RECALLED_VALUES = (type(None), bool, int, float, str, tuple)  # which nobody changes


class NoCalls:
    """The calls of a function of which none is remembered."""

    def launch(self, values: tuple[Any, ...]) -> Any:
        return NotImplemented


NO_CALLS = NoCalls()
# By function. `launch(values)` gives what the call gives, or NotImplemented: nothing is launched.
recalled: dict[str, Any] = dict.fromkeys(("prefill", "decode", "append_kv"), NO_CALLS)
_remembered: dict[tuple[Any, ...], Any] = {}  # by form


def forget_calls() -> None:
    _remembered.clear()
    for name in recalled:
        recalled[name] = NO_CALLS


def remember_call(
    function: Callable[..., Any],
    values: tuple[Any, ...],
    form: tuple[Any, ...],
    bound: BoundRecipe,
    tally: Tally | None,
    tensors: Sequence[Any],
    names: Sequence[str],
    results: tuple[torch.Tensor, torch.Tensor | None] | None,
) -> None:
    """Let calls of the function with values and tensors like these be launched as this one.

    `values` are of all arguments in order. `tensors` are those that the recipe was learnt from, in
    its order, `names` the arguments that they are of, or "lse"; `results` are out and lse.
    """
    built = recall_module()
    if built is None or torch.cuda.current_device() != bound.device.index:
        return
    call = _remembered.get(form)
    if call is None or not call.matches(values):
        # new, or made in another mode: a check tells inference mode from others
        call = _call_of(built, function, values, bound, tally, tensors, names, results)
        if call is None:
            return
        _remembered[form] = call
    if recalled[function.__name__] is NO_CALLS:
        recalled[function.__name__] = built.Calls()
    recalled[function.__name__].remember(call)


@cache
def recall_module() -> Any:
    """The compiled C, None where it cannot be."""
    try:
        return compile_module_from_src(*RECALL_SOURCE)
    except Exception:  # no compiler, no headers of Python, a triton that builds in another way
        return None


def _call_of(
    built: Any,
    function: Callable[..., Any],
    values: tuple[Any, ...],
    bound: BoundRecipe,
    tally: Tally | None,
    tensors: Sequence[Any],
    names: Sequence[str],
    results: tuple[torch.Tensor, torch.Tensor | None] | None,
) -> Any:
    """The call as C remembers it; None where something about it cannot be told again."""
    places = [n for n, value in enumerate(values) if isinstance(value, torch.Tensor)]
    others = [value for n, value in enumerate(values) if n not in places]
    first = {id(values[place]): place for place in reversed(places)}
    # a check takes no tensor twice: such a one is to be given twice again
    once = [place for place in places if first[id(values[place])] == place]
    twice = [(place, first[id(values[place])]) for place in places if place not in once]
    if not all(type(value) in RECALLED_VALUES for value in others):
        return None
    check = _check_of(tuple(values[place] for place in once))
    if check is None:
        return None
    place_of = {name: place for place, name in enumerate(signature(function).parameters)}
    out_at = place_of.get("out", -1)
    makes_out = results is not None and values[out_at] is None
    place_of |= {"lse": NEW_LSE} | ({"out": NEW_OUT} if makes_out else {})
    sources = []
    for which in bound.used:
        place = place_of[names[which]]
        if place >= 0 and values[place].data_ptr() != tensors[which].data_ptr():
            return None  # a copy of the argument
        sources.append((place, 0))
    out, lse = results or (None, None)
    context = ctypes.c_void_p()
    if cuda_context()(ctypes.byref(context)):
        return None
    return built.Call(
        tuple(... if n in places else value for n, value in enumerate(values)),
        tuple(once),
        tuple(place for pair in twice for place in pair),
        check,
        (*sources, *((WORKSPACE, offset) for offset in bound.offsets)),
        _like(out) if makes_out else None,
        _like(lse),
        _workspace_like(bound),
        out_at,
        0 if out is None else 1 if lse is None else 2,
        tuple(_step(step.launch, step.pointers, step.maps) for step in bound.steps),
        bound.current_stream,
        bound.device.index,
        tally,
        last_tally,
        bound,
        function_address(cuda_launcher()),
        function_address(cuda_context()),
        context.value or 0,
    )


def _step(launch: Any, pointers: Sequence[tuple[int, int]], maps: Sequence[Any]) -> tuple[Any, ...]:
    """A launch as C copies it."""
    return (
        launch.function,
        ctypes.string_at(launch.config_at, ctypes.sizeof(launch.config)),
        CudaLaunchConfig.stream.offset,
        bytes(launch.words),
        (*((place, which, None) for place, which in pointers), *maps),
    )


def _like(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A tensor without memory whose like can be made."""
    if tensor is None:
        return None
    like = torch.empty_like(tensor)
    like.untyped_storage().resize_(0)
    return like


def _workspace_like(bound: BoundRecipe) -> torch.Tensor | None:
    if not bound.workspace_bytes:
        return None
    return _like(torch.empty(bound.workspace_bytes, dtype=torch.uint8, device=bound.device))


def _check_of(tensors: tuple[torch.Tensor, ...]) -> Callable[..., bool] | None:
    """Whether tensors have the types, shapes, strides and devices of these, asked at once.

    None where torch has no such check, and where a gradient may be asked for: its mode is not part
    of the check.
    """
    if any(tensor.requires_grad for tensor in tensors):
        return None
    guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    try:
        check = guards.TensorGuards(
            *tensors,
            dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
            dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
        ).check
    except (AttributeError, TypeError):  # it is no public part of torch
        return None
    return check if check(*tensors) else None
