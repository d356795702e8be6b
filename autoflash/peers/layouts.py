"""Layouts: the tensors of a prefill as a contender wants them, and its result as ours is."""

from collections.abc import Callable

import torch

from autoflash.inputs import Inputs
from autoflash.problem import Problem

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def in_layout(one: Inputs, layout: str) -> Tensors:
    """q, k, v in the layout that a contender wants, contiguous."""
    tensors = (one.q, one.k, one.v)
    if layout == one.problem.layout:
        return tensors
    q, k, v = (tensor.transpose(1, 2).contiguous() for tensor in tensors)
    return q, k, v


def from_layout(problem: Problem, layout: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """What brings an `out` in `layout` to the problem's."""
    return (lambda out: out) if layout == problem.layout else (lambda out: out.transpose(1, 2))


def packed(one: Inputs) -> tuple[Tensors, torch.Tensor, torch.Tensor]:
    """q, k, v as (tokens, heads, head_dim), and where each sequence's queries and keys begin."""
    p = one.problem
    if one.cu_seqlens_q is not None and one.cu_seqlens_k is not None:
        return (one.q, one.k, one.v), one.cu_seqlens_q, one.cu_seqlens_k
    q, k, v = (tensor.flatten(0, 1) for tensor in in_layout(one, "bshd"))
    numbers = torch.arange(p.batch + 1, dtype=torch.int32, device=one.q.device)
    return (q, k, v), numbers * p.seqlen_q, numbers * p.seqlen_k


def packed_queries(one: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """(total_q, num_heads, head_dim) of a prefill over pages, and where each sequence's begin."""
    p = one.problem
    if one.cu_seqlens_q is not None:
        return one.q, one.cu_seqlens_q
    q = one.q if p.layout == "bshd" else one.q.transpose(1, 2)
    numbers = torch.arange(p.batch + 1, dtype=torch.int32, device=q.device)
    return q.flatten(0, 1), numbers * p.seqlen_q


def from_packed(problem: Problem) -> Callable[[torch.Tensor], torch.Tensor]:
    """What brings an `out` of tokens to the problem's layout."""
    if problem.varlen:
        return lambda out: out
    to_problem = from_layout(problem, "bshd")
    return lambda out: to_problem(out.unflatten(0, (problem.batch, problem.seqlen_q)))
