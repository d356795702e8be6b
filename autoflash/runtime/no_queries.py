"""No queries: calls of an empty batch, or of no query token. Nothing is launched for them."""

from __future__ import annotations

import torch

from .arguments import check_output, check_tensors
from .problem import LATENT_WIDTHS, LAYOUTS, ProblemError
from .scales import QUANTISED_ARGUMENTS


def attended_by_none(
    function: str,
    q: torch.Tensor,
    others: dict[str, torch.Tensor | None],
    layout: str,
    out: torch.Tensor | None,
    return_lse: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`out` or (out, lse) without an element. `others` are K and V, of which V may be latent.

    Gradients of what is attended are zeros. Raises ProblemError for tensors that never fit q.
    """
    if layout not in LAYOUTS:
        raise ProblemError(f"{function}: layout {layout!r} is none of {', '.join(LAYOUTS)}")
    given = {name: tensor for name, tensor in others.items() if tensor is not None}
    with torch.no_grad():
        check_tensors(function, q, q.dim(), QUANTISED_ARGUMENTS, of_others=4, **given)
    _, v = others.values()
    head_dim_v = LATENT_WIDTHS[1] if v is None else v.shape[-1]
    if out is None:
        out = q.new_empty((*q.shape[:-1], head_dim_v))
    check_output(function, out, q, head_dim_v)
    heads, tokens = (2, 1) if layout == "bshd" else (1, 2)
    shape = q.shape[:-1] if q.dim() == 3 else (q.shape[0], q.shape[heads], q.shape[tokens])
    lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    if torch.is_grad_enabled() and any(each.requires_grad for each in (q, *given.values())):
        zero = torch.stack([each.sum() for each in (q, *given.values())]).sum() * 0
        out, lse = out + zero, lse + zero.float()
    return (out, lse) if return_lse else out
