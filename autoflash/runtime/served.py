"""Served: what served a call, found again for others of its form and launched for their tensors.

A call's form is looked up in a few microseconds. For calls that repeat the last one there is a
check of torch's own, of all tensors at once, that takes a fraction of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from .bound import BoundRecipe, bind_recipe
from .capture import refuse_unloaded
from .launch import Launch, run_plan
from .problem import Problem
from .recipe import NewWorkspace, Recipe, learn_recipe
from .tally import Tally, count_call

MOST_FORMS = 1024  # of calls whose recipes are kept


class Served(NamedTuple):
    """What serves calls of one form."""

    tally: Any  # a Tally; None of appending, which is not tallied
    recipe: Recipe
    bound: BoundRecipe | None


class Repeat(NamedTuple):
    """What served the last call with some values, and how its tensors are told from others."""

    served: Served
    bound: BoundRecipe
    tensors_of: Callable[[Sequence[Any]], tuple[torch.Tensor, ...]]  # those among the arguments
    check: Callable[..., bool]


_served: dict[tuple[Any, ...], Served] = {}
_checked: dict[tuple[Any, ...], Repeat] = {}
_repeats: dict[tuple[Any, ...], Repeat] = {}


def forget_served() -> None:
    for known in (_served, _checked, _repeats):
        known.clear()


def served_before(form: tuple[Any, ...]) -> Served | None:
    """What served a call of this form."""
    return _served.get(form)


def repeated(key: tuple[Any, ...], given: Sequence[Any]) -> Repeat | None:
    """What served the last call with this key, if its tensors were like these.

    They may be aligned in other ways, which a bound launch looks at. The key names the function,
    holds all values and numbers, and says which tensors are not given.
    """
    repeat = _repeats.get(key)
    if repeat is None or not repeat.check(*repeat.tensors_of(given)):
        return None
    return repeat


def remember_repeat(
    key: tuple[Any, ...], given: Sequence[Any], form: tuple[Any, ...], served: Served
) -> None:
    """Let calls with this key and tensors like these be served so without their form."""
    if served.bound is None:
        return
    repeat = _checked.get(form)
    if repeat is None or not repeat.check(*repeat.tensors_of(given)):
        # new, or made in another mode: a check tells inference mode from others
        places = [n for n, each in enumerate(given) if isinstance(each, torch.Tensor)]
        tensors_of = itemgetter(*places)
        check = _check_of(tensors_of(given))
        if check is None:
            return
        repeat = _checked[form] = Repeat(served, served.bound, tensors_of, check)
    if len(_repeats) == MOST_FORMS:
        _repeats.clear()
    _repeats[key] = repeat


def launch_first(
    form: tuple[Any, ...],
    tally: Tally | None,
    tensors: Sequence[Any],
    make_plan: Callable[[NewWorkspace], list[Launch]],
) -> None:
    """Plan and launch a call of a form not seen before, which is then served by its recipe."""
    count_call(tally)
    plan, recipe = learn_recipe(make_plan, tensors, workspaces_on(tensors[0]))
    compiled = launch_plan(plan, tensors[0])
    if recipe is None:
        return
    if len(_served) == MOST_FORMS:
        forget_served()
    _served[form] = Served(tally, recipe, bind_recipe(recipe, compiled, tensors))


def launch_again(served: Served, tensors: Sequence[Any]) -> None:
    """Launch for these tensors what served others of their form."""
    count_call(served.tally)
    if served.bound is None or not served.bound.launch(tensors):
        launch_plan(served.recipe.plan(tensors, workspaces_on(tensors[0])), tensors[0])


def launch_repeat(repeat: Repeat, tensors: Sequence[Any]) -> bool:
    """The same by the bound launches alone; False where they cannot, and nothing is launched."""
    if not repeat.bound.launch(tensors):
        return False
    count_call(repeat.served.tally)
    return True


def outputs_of(
    q: torch.Tensor, problem: Problem, out: torch.Tensor | None, return_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`out`, made if it is not given, and `lse` if it is asked for."""
    if out is None:
        if problem.head_dim_v == problem.head_dim and q.is_contiguous():
            out = torch.empty_like(q)  # takes half of the time
        else:
            out = q.new_empty((*q.shape[:-1], problem.head_dim_v))
    if not return_lse:
        return out, None
    shape = (problem.batch, problem.num_heads, problem.seqlen_q)[: q.dim() - 1]
    return out, torch.empty(shape, dtype=torch.float32, device=q.device)


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


def launch_plan(plan: list[Launch], q: torch.Tensor) -> list[Any]:
    """Run the plan on the tensors' own device, current or not; the compiled kernels."""
    if not q.is_cuda:
        return run_plan(plan)
    current = q.device.index == torch.cuda.current_device()
    with nullcontext() if current else torch.cuda.device(q.device):
        refuse_unloaded(plan)
        return run_plan(plan)


def workspaces_on(q: torch.Tensor) -> NewWorkspace:
    """A maker of scratch tensors; the caching allocator orders their reuse by stream."""
    return lambda shape, dtype: torch.empty(shape, dtype=dtype, device=q.device)
