"""Served: what served a call, found again for others of its form and launched for their tensors.

A call's form is looked up in a few microseconds; from then on calls like it are recalled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from .bound import BoundRecipe, bind_recipe
from .capture import refuse_unloaded
from .launch import Launch, run_plan
from .problem import Problem
from .recall import forget_calls, recall_module, remember_call
from .recipe import NewWorkspace, Recipe, learn_recipe
from .tally import Tally, count_call

MOST_FORMS = 1024  # of calls whose recipes are kept


class Served(NamedTuple):
    """What serves calls of one form."""

    tally: Any  # a Tally; None of appending, which is not tallied
    recipe: Recipe
    bound: BoundRecipe | None


_served: dict[tuple[Any, ...], Served] = {}


def forget_served() -> None:
    _served.clear()
    forget_calls()


def served_before(form: tuple[Any, ...]) -> Served | None:
    """What served a call of this form."""
    return _served.get(form)


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
    bound = bind_recipe(recipe, compiled, tensors)
    _served[form] = Served(tally, recipe, bound)
    if bound is not None:
        recall_module()  # compiled now, with the kernels


def launch_again(served: Served, tensors: Sequence[Any]) -> None:
    """Launch for these tensors what served others of their form."""
    count_call(served.tally)
    if served.bound is None or not served.bound.launch(tensors):
        launch_plan(served.recipe.plan(tensors, workspaces_on(tensors[0])), tensors[0])


def remember_served(
    form: tuple[Any, ...],
    served: Served,
    tensors: Sequence[Any],
    function: Callable[..., Any],
    values: tuple[Any, ...],
    names: Sequence[str],
    results: tuple[torch.Tensor, torch.Tensor | None] | None,
) -> None:
    """Let calls like this one of the function be recalled, as `remember_call` says."""
    if served.bound is not None:
        call = (function, values, form, served.bound, served.tally)
        remember_call(*call, tensors, names, results)


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
