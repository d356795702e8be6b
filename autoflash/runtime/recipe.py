"""Recipe: the plan of a call, made again for other tensors of the same form without planning.

A plan reads of its tensors what their form says, and nothing else: two calls of one form differ in
the tensors they name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .launch import Launch

NewWorkspace = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


class Step(NamedTuple):
    """One launch. `tensors` and `descriptors` are (place among the arguments, which tensor)."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    tensors: tuple[tuple[int, int], ...]
    descriptors: tuple[tuple[int, int], ...]


class Recipe(NamedTuple):
    """The steps, and the workspaces that they name after the call's own tensors."""

    steps: tuple[Step, ...]
    workspaces: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    num_tensors: int

    def plan(self, tensors: Sequence[Any], new_workspace: NewWorkspace) -> list[Launch]:
        """The launches for these tensors, in the order of those it was learnt from."""
        named = [*tensors, *(new_workspace(shape, dtype) for shape, dtype in self.workspaces)]
        plan = []
        for kernel, grid, arguments, options, places, descriptors in self.steps:
            filled = list(arguments)
            for place, which in places:
                filled[place] = named[which]
            for place, which in descriptors:
                filled[place] = with_base(arguments[place], named[which])
            plan.append((kernel, grid, filled, options))
        return plan


def form_of(given: Any) -> Any:
    """What a plan may know of an argument: a tensor's form, a number; of others only the type."""
    if isinstance(given, torch.Tensor):
        aligned = given.data_ptr() % 16 == 0
        gradient = given.requires_grad and torch.is_grad_enabled()  # is refused
        return given.dtype, given.shape, given.stride(), aligned, given.device, gradient
    return given if isinstance(given, (int, float)) else type(given)


def learn_recipe(
    make_plan: Callable[[NewWorkspace], list[Launch]],
    tensors: Sequence[Any],
    new_workspace: NewWorkspace,
) -> tuple[list[Launch], Recipe | None]:
    """The plan, and its recipe; None where the plan names a tensor that is not among these.

    None too where one tensor is given twice: the plan does not say which of the two it names.
    """
    made: list[torch.Tensor] = []

    def noted(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        made.append(new_workspace(shape, dtype))
        return made[-1]

    plan = make_plan(noted)
    places_of = [
        (id(tensor), place)
        for place, tensor in enumerate([*tensors, *made])
        if isinstance(tensor, torch.Tensor)
    ]
    which = dict(places_of)
    if len(which) < len(places_of):
        return plan, None
    steps = []
    for kernel, grid, arguments, options in plan:
        places, descriptors, kept = [], [], list(arguments)
        for place, argument in enumerate(arguments):
            base = getattr(argument, "base", None)
            named = argument if isinstance(argument, torch.Tensor) else base
            if not isinstance(named, torch.Tensor):
                continue
            if id(named) not in which:
                return plan, None
            if named is argument:
                places.append((place, which[id(named)]))
                kept[place] = None  # a recipe keeps no tensor alive
            else:
                descriptors.append((place, which[id(named)]))
                kept[place] = with_base(argument, None)
        steps.append(Step(kernel, grid, tuple(kept), options, tuple(places), tuple(descriptors)))
    workspaces = tuple((tuple(tensor.shape), tensor.dtype) for tensor in made)
    return plan, Recipe(tuple(steps), workspaces, len(tensors))


def with_base(descriptor: Any, base: Any) -> Any:
    """The descriptor for another tensor of the same form, whose checks it has passed."""
    other = object.__new__(type(descriptor))
    other.__dict__.update(descriptor.__dict__)
    other.base = base
    return other
