"""Varlen: prefill() of packed sequences, whose lengths change from call to call.

So every call is planned anew: hardly two have the same form. What serves it is chosen for the size
class that it is of: there are few of them.
"""

from __future__ import annotations

import torch

from .arguments import check_output, prefill_problem, scale_or_default
from .installed import tally_for
from .modifiers import Modifiers, modifiers_of, prefill_plan
from .packed import check_packed, size_class
from .served import launch_plan, workspaces_on
from .tally import count_call


def prefill_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    modifiers: Modifiers,
    causal: bool,
    layout: str,
    softmax_scale: float | None,
    out: torch.Tensor | None,
    return_lse: bool,
    check: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """prefill() of sequences that `modifiers` say where to find. Raises ProblemError as it does."""
    problem = prefill_problem(q, k, v, causal, layout, modifiers)
    if out is not None:
        check_output("prefill", out, q, problem.head_dim_v)
    if check:
        check_packed(q, k, modifiers)
    scale = scale_or_default("prefill", softmax_scale, problem.head_dim)
    tally, device = tally_for(size_class(problem), q)
    out = q.new_empty((*q.shape[:-1], problem.head_dim_v)) if out is None else out
    lse = None
    if return_lse:
        lse = torch.empty((problem.num_heads, len(q)), dtype=torch.float32, device=q.device)
    if len(q):
        modifiers, knobs = modifiers_of(problem, modifiers), tally.choice.knobs
        first = (q, k, v, out, lse, scale, problem.layout, device.num_sms, knobs)
        plan = prefill_plan(tally.choice.module, problem, modifiers, *first, workspaces_on(q))
        launch_plan(plan, q)
    count_call(tally)
    return (out, lse) if lse is not None else out
