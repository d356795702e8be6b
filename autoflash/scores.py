"""Scores: what changes scaled scores before the softmax, in the order that the contract gives."""

import torch

from autoflash.mask import places_after
from autoflash.runtime.modifiers import Modifiers


def changed_scores(
    modifiers: Modifiers,
    b: int,
    heads: slice,
    rows: slice | torch.Tensor,
    queries: int,
    keys: int,
    scores: torch.Tensor,
    columns: slice | torch.Tensor = slice(None),
) -> torch.Tensor:
    """Scaled scores (heads, rows, columns) of sequence `b` capped, then biased.

    `rows` and `columns` are which of the sequence's `queries` and `keys`. `modifiers` are those
    that plans take, of which windows, sinks and packing play no part.
    """
    if modifiers.softcap:
        scores = modifiers.softcap * (scores / modifiers.softcap).tanh()
    if modifiers.alibi_slopes is not None:
        slopes = modifiers.alibi_slopes[b, heads, None, None].to(scores.dtype)
        places = torch.arange(queries, device=scores.device)[rows]
        scores = scores - slopes * places_after(places, keys, queries)[:, columns].abs()
    if modifiers.bias is not None:
        # that of a cache goes on past its length, that of packed sequences past theirs
        bias = modifiers.bias[b, heads, :queries][:, rows][:, :, :keys]
        scores = scores + bias[:, :, columns].to(scores.dtype)
    return scores


def softcap_slope(modifiers: Modifiers, scores: torch.Tensor) -> torch.Tensor | float:
    """The derivative of capped scores with respect to scaled ones, 1 without a softcap."""
    if not modifiers.softcap:
        return 1.0
    # 1 - tanh ** 2, with all its digits where the softcap is reached
    return (scores / modifiers.softcap).cosh() ** -2
