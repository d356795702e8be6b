"""Dropout as a caller gives it: the probability, a (seed, offset), and what both are where not."""

from __future__ import annotations

from math import isfinite

import torch

from .problem import ProblemError

DROPOUT_STEPS = 65536  # a number of 16 bits is drawn for each element
DROPOUT_SEEDS = 2**62  # those that are drawn; any int64 may be given


def drawn_rng(q: torch.Tensor) -> torch.Tensor:
    """(seed, offset) from the generator of torch that is q's device's.

    Its state lies on the host, so nothing waits; a CUDA graph draws another at each replay.
    """
    return torch.randint(DROPOUT_SEEDS, (2,), dtype=torch.int64, device=q.device)


def whole_probability(dropout_p: float) -> float:
    """The probability as kernels have it, the nearest whole number of 65536ths below 1."""
    return min(round(dropout_p * DROPOUT_STEPS), DROPOUT_STEPS - 1) / DROPOUT_STEPS


def check_dropout(
    function: str, dropout_p: float, rng: torch.Tensor | None, q: torch.Tensor
) -> None:
    """Raise ProblemError unless these are a probability and, where it is not 0, its rng."""
    if not (isfinite(dropout_p) and 0.0 <= dropout_p < 1.0):
        raise ProblemError(f"{function}: dropout_p {dropout_p} is not from 0 to less than 1")
    if not dropout_p:
        return
    if not isinstance(rng, torch.Tensor):
        raise ProblemError(f"{function}: rng must be a tensor, given {type(rng).__name__}")
    if tuple(rng.shape) != (2,) or rng.dtype != torch.int64:
        raise ProblemError(
            f"{function}: rng is {tuple(rng.shape)} {rng.dtype}, expected (2,) torch.int64,"
            " a seed and an offset"
        )
    if rng.device != q.device:
        raise ProblemError(f"{function}: rng is on {rng.device}, q is on {q.device}")
    if not rng.is_contiguous():
        raise ProblemError(f"{function}: rng must be contiguous")
