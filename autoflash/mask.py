"""Mask: which keys a query sees, as the contract defines it."""

import torch

from autoflash.problem import Problem


def visible(
    problem: Problem, rows: torch.Tensor, keys: int, queries: int | None = None
) -> torch.Tensor:
    """(rows, keys) booleans: whether key j is in the window of row i at p = i + keys - queries.

    A sequence has `seqlen_q` queries unless said otherwise.
    """
    after = places_after(rows, keys, problem.seqlen_q if queries is None else queries)
    seen = torch.ones_like(after, dtype=torch.bool)
    left, right = problem.window
    if left >= 0:
        seen &= after >= -left
    if right >= 0:
        seen &= after <= right
    return seen


def places_after(rows: torch.Tensor, keys: int, queries: int) -> torch.Tensor:
    """(rows, keys): how far behind its query's position a key stands; negative before it."""
    position = rows + keys - queries
    return torch.arange(keys, device=rows.device)[None, :] - position[:, None]
