"""Packed sequences: where each begins among the tokens of all, checked, and what they pose."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from .modifiers import Modifiers
from .problem import Problem, ProblemError

CUMULATIVE_DTYPES = (torch.int32, torch.int64)


def is_packed(given: Modifiers) -> bool:
    """Whether the caller gave any of what only packed sequences have."""
    lengths = (given.cu_seqlens_q, given.cu_seqlens_k, given.max_seqlen_q, given.max_seqlen_k)
    return any(each is not None for each in lengths)


def packed_layout(layout: str, given: Modifiers) -> str:
    """The layout a call has. Raises ProblemError for one that does not go with what is given."""
    if not is_packed(given):
        if layout == "thd":
            raise ProblemError("prefill: layout 'thd' needs cu_seqlens_q and what belongs to it")
        return layout
    if layout == "bhsd":
        raise ProblemError("prefill: layout 'bhsd' has an axis of sequences, packed ones have none")
    return "thd"


def packed_fields(q: torch.Tensor, k: torch.Tensor, given: Modifiers) -> dict[str, Any]:
    """batch, seqlen_q, seqlen_k and lengths of a Problem.

    q is (total_q, num_heads, head_dim), k (total_k, num_kv_heads, head_dim). Raises ProblemError
    naming the argument that does not fit.
    """
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    cu_seqlens_q, _, *longest = _packing(q, given, names)
    batch = len(cu_seqlens_q) - 1
    full = (len(q), len(k)) == (batch * longest[0], batch * longest[1])
    return {
        **packed_queries(q, given),
        "seqlen_k": longest[1],
        "lengths": "equal" if full else "ragged",
    }


def packed_queries(q: torch.Tensor, given: Modifiers) -> dict[str, Any]:
    """batch and seqlen_q alone, which is all that is packed where keys lie in pages."""
    cu_seqlens_q, longest = _packing(q, given, ("cu_seqlens_q", "max_seqlen_q"))
    # where there is nothing at all, nothing is launched
    return {"batch": max(1, len(cu_seqlens_q) - 1), "seqlen_q": max(1, longest)}


def check_packed(q: torch.Tensor, k: torch.Tensor, given: Modifiers) -> None:
    """Raise ProblemError for sequences that are not there. Waits for the device."""
    for name, cumulative, longest, tokens in (
        ("cu_seqlens_q", given.cu_seqlens_q, given.max_seqlen_q, len(q)),
        ("cu_seqlens_k", given.cu_seqlens_k, given.max_seqlen_k, len(k)),
    ):
        if cumulative is None or longest is None:
            continue  # of keys in pages
        ends = cumulative.tolist()
        lengths = [end - start for start, end in pairwise(ends)]
        if ends[0] != 0 or ends[-1] > tokens or min(lengths, default=0) < 0:
            raise ProblemError(f"prefill: {name} does not rise from 0 to at most {tokens} tokens")
        if max(lengths, default=0) > longest:
            raise ProblemError(
                f"prefill: {name} has a sequence of {max(lengths)} tokens, the longest is said to"
                f" have {longest}"
            )


def _packing(q: torch.Tensor, given: Modifiers, names: tuple[str, ...]) -> list[Any]:
    """What the names are of. Raises ProblemError where it is not given or does not fit."""
    values = [getattr(given, name) for name in names]
    for name, value in zip(names, values):
        if value is None:
            raise ProblemError(f"prefill: packed sequences need {name}")
        if name.startswith("max"):
            if type(value) is not int or value < 0:
                raise ProblemError(f"prefill: {name} {value!r} is not a number of tokens")
            continue
        if value.dtype not in CUMULATIVE_DTYPES:
            raise ProblemError(f"prefill: {name} is {value.dtype}, not int32 or int64")
        if value.device != q.device:
            raise ProblemError(f"prefill: {name} is on {value.device}, q is on {q.device}")
        if value.dim() != 1 or not value.is_contiguous() or len(value) != len(values[0]):
            raise ProblemError(f"prefill: {name} must be contiguous, (batch + 1,) as the other is")
    return values


def size_class(problem: Problem) -> Problem:
    """The problem with its sizes rounded up to powers of two, as buckets of tuned ones are."""
    sizes = {name: getattr(problem, name) for name in ("batch", "seqlen_q", "seqlen_k")}
    rounded = {name: 1 << (size - 1).bit_length() for name, size in sizes.items() if size}
    return replace(problem, **rounded)
