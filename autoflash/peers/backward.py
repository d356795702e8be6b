"""Peers in backward: torch.autograd.grad of what their forwards gave. One that cannot raises."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from autoflash.gradients import Gradients
from autoflash.inputs import Inputs
from autoflash.peers import prefill
from autoflash.peers.contender import Contender, Maker
from autoflash.problem import Problem

# Who has a backward, and the layout in which its forward takes tensors as they are.
LAYOUTS = {
    **dict.fromkeys(("cudnn", "flash", "math", "flex_attention"), "bhsd"),
    **dict.fromkeys(("flash_attention_2", "flash_attention_4"), "bshd"),
}


def differentiated(make: Maker, layout: str | None, inputs: list[Inputs]) -> Contender:
    """The backward of what `make` makes a contender's forward of; ours takes any layout.

    The forward ran before; a call is the whole pass, with its statistics, zeroing and conversions.
    Its result is dq, dk and dv, of modifiers none.
    """
    problem = inputs[0].problem
    if layout is None or problem.varlen:
        layout = problem.layout
    leaves = [leaves_of(one, layout) for one in inputs]
    forward = make([one for one, _ in leaves])
    calls = []
    for number, (one, dout) in enumerate(leaves):
        tensors, out = (one.q, one.k, one.v), forward.out(number)
        calls.append(functools.partial(torch.autograd.grad, out, tensors, dout, retain_graph=True))
    return Contender(calls, gradients_in(problem, layout))


def gradients_in(problem: Problem, layout: str) -> Callable[[Any], Gradients]:
    """What brings gradients in `layout` to the problem's."""
    same = layout == problem.layout
    return lambda found: Gradients(*(each if same else each.transpose(1, 2) for each in found))


def leaves_of(inputs: Inputs, layout: str) -> tuple[Inputs, torch.Tensor]:
    """q, k and v as leaves that ask for gradients, contiguous in this layout; and `dout`."""
    same = layout == inputs.problem.layout

    def laid_out(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if same else tensor.transpose(1, 2).contiguous()

    q, k, v = (laid_out(t).detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
    assert inputs.dout is not None
    forward = replace(inputs.problem, op="prefill", layout=layout)
    made = {"out": None, "lse": None, "dout": None, "dlse": None}
    return replace(inputs, problem=forward, q=q, k=k, v=v, **made), laid_out(inputs.dout)


PEERS: dict[str, Maker] = {
    name: functools.partial(differentiated, prefill.PEERS[name], layout)
    for name, layout in LAYOUTS.items()
}
