"""The eager specification of the backward: the gradients that every kernel is compared with.

With P = exp(s - lse) and dP = dout v^T, dS = P (dP - delta + dlse) where delta = rowsum(dout out);
then dv = P^T dout, dq = scale dS k and dk = scale dS^T q, summed over the heads of a group
(FlashAttention-2, algorithm 2).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import torch

from autoflash.inputs import TORCH_DTYPES, Inputs
from autoflash.mask import visible
from autoflash.problem import Problem
from autoflash.reference import Row, eager, product_in_order, reference

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Gradients(NamedTuple):
    """Of q, k and v, each in its tensor's layout; or single rows of them, (rows, head_dim)."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


def reference_gradients(
    inputs: Inputs, softmax_scale: float | None = None
) -> tuple[Gradients, Gradients]:
    """The gradients in fp64 with a forward of their own, and the size of each of their rows.

    A row's size is the RMS it would have if the signs of all the terms it sums were random. Of a
    row whose terms cancel, as a query's that sees one key, it says what rounding is to be compared
    with; where no query and key see each other it is 0. Sizes are in the layouts of the gradients,
    1 wide.
    """
    out, lse = reference(inputs, softmax_scale)
    return _whole(replace(inputs, out=out, lse=lse), softmax_scale, torch.float64, None)


def eager_gradients(inputs: Inputs, softmax_scale: float | None = None) -> Gradients:
    """The same in fp32 with P, dS and the results rounded to the input type, after `eager`'s out.

    fp32 inputs are summed in order, as in `eager`.
    """
    dtype = TORCH_DTYPES[inputs.problem.dtype]
    out, lse = eager(inputs, softmax_scale)
    given = replace(inputs, out=out, lse=lse)
    return _rounded(_whole(given, softmax_scale, torch.float32, dtype)[0], dtype)


def reference_gradient_rows(
    inputs: Inputs, rows: Sequence[Row], softmax_scale: float | None = None
) -> tuple[Gradients, Gradients]:
    """Single rows of the gradients, and their sizes, of the inputs' own `out` and `lse`.

    A row (sequence, query head, query) is one of dq, and `key_rows` are those of dk and dv. What a
    real size needs: no score matrix is made, and the forward, which would need it, is given.
    """
    return _picked(inputs, rows, softmax_scale, torch.float64, None)


def eager_gradient_rows(
    inputs: Inputs, rows: Sequence[Row], softmax_scale: float | None = None
) -> Gradients:
    """The same rows as `eager_gradients` computes them, of the inputs' own `out` and `lse`."""
    dtype = TORCH_DTYPES[inputs.problem.dtype]
    return _rounded(_picked(inputs, rows, softmax_scale, torch.float32, dtype)[0], dtype)


def key_rows(problem: Problem, rows: Sequence[Row]) -> list[Row]:
    """(sequence, KV head, key) for each query's row: as far along the keys, of its group's head."""
    p = problem
    last_key, last_query = p.seqlen_k - 1, max(1, p.seqlen_q - 1)
    return [(b, head // p.group_size, i * last_key // last_query) for b, head, i in rows]


@dataclass(frozen=True)
class _Group:
    """A KV head of a sequence and its query heads: q, out and dout (group, seqlen_q, head_dim)."""

    q: torch.Tensor
    k: torch.Tensor  # (seqlen_k, head_dim), as v
    v: torch.Tensor
    out: torch.Tensor
    dout: torch.Tensor
    lse: torch.Tensor  # (group, seqlen_q), as dlse
    dlse: torch.Tensor


def _group_of(inputs: Inputs, b: int, kv_head: int, compute: torch.dtype) -> _Group:
    p = inputs.problem
    assert inputs.out is not None and inputs.dout is not None and inputs.lse is not None

    def heads_first(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[b].transpose(0, 1) if p.layout == "bshd" else tensor[b]

    heads = slice(kv_head * p.group_size, (kv_head + 1) * p.group_size)
    q, out, dout = (heads_first(t)[heads].to(compute) for t in (inputs.q, inputs.out, inputs.dout))
    k, v = (heads_first(t)[kv_head].to(compute) for t in (inputs.k, inputs.v))
    lse = inputs.lse[b, heads].to(compute)
    dlse = torch.zeros_like(lse) if inputs.dlse is None else inputs.dlse[b, heads].to(compute)
    return _Group(q, k, v, out, dout, lse, dlse)


def _whole(
    inputs: Inputs, softmax_scale: float | None, compute: torch.dtype, p_dtype: torch.dtype | None
) -> tuple[Gradients, Gradients]:
    p = inputs.problem
    scale = p.head_dim**-0.5 if softmax_scale is None else softmax_scale
    every = slice(None)
    found = []
    for b in range(p.batch):
        for kv_head in range(p.num_kv_heads):
            group = _group_of(inputs, b, kv_head, compute)
            terms = _terms(p, group, every, every, scale, p_dtype)
            found.append([_summed(one, p_dtype) for one in terms])
    gradients, squares = zip(*found, strict=True)
    sizes = [_sizes(each) for each in squares]
    return _assembled(p, gradients), _assembled(p, sizes)


def _picked(
    inputs: Inputs,
    rows: Sequence[Row],
    softmax_scale: float | None,
    compute: torch.dtype,
    p_dtype: torch.dtype | None,
) -> tuple[Gradients, Gradients]:
    p = inputs.problem
    scale = p.head_dim**-0.5 if softmax_scale is None else softmax_scale
    every, found = slice(None), []
    both = list(zip(rows, key_rows(p, rows), strict=True))
    for (b, kv_head), members in groupby(both, key=lambda pair: pair[1][:2]):
        query_rows, of_keys = zip(*members, strict=True)
        group = _group_of(inputs, b, kv_head, compute)
        device = group.q.device
        heads = torch.tensor([head % p.group_size for _, head, _ in query_rows], device=device)
        queries, keys = (
            torch.tensor([row[2] for row in some], device=device) for some in (query_rows, of_keys)
        )
        own = torch.arange(len(queries), device=device)
        across = _terms(p, group, queries, every, scale, p_dtype)
        down = _terms(p, group, every, keys, scale, p_dtype)
        gradients, squares = (
            Gradients(_summed(a, p_dtype).dq[heads, own], *_summed(d, p_dtype)[1:])
            for a, d in zip(across, down, strict=True)
        )
        found.append((gradients, _sizes(squares)))
    parts = [Gradients(*map(torch.cat, zip(*each, strict=True))) for each in zip(*found)]
    return parts[0], parts[1]


class _Terms(NamedTuple):
    """What is multiplied and summed to gradients: p and ds are (group, queries, keys)."""

    p: torch.Tensor
    ds: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    dout: torch.Tensor
    scale: float


def _terms(
    problem: Problem,
    group: _Group,
    queries: slice | torch.Tensor,
    keys: slice | torch.Tensor,
    scale: float,
    p_dtype: torch.dtype | None,
) -> tuple[_Terms, _Terms]:
    """The terms of some queries and keys, and the squares of the parts of each."""
    product = _product(p_dtype)
    q, dout, out = (t[:, queries] for t in (group.q, group.dout, group.out))
    k, v = group.k[keys], group.v[keys]
    lse, dlse = (t[:, queries, None] for t in (group.lse, group.dlse))
    rows = torch.arange(problem.seqlen_q, device=q.device)[queries]
    seen = visible(problem, rows, problem.seqlen_k)[:, keys]
    p = (product(q, k.T) * scale - lse).exp().masked_fill(~seen, 0.0)
    inner = product(dout, v.T) - (dout * out).sum(dim=2, keepdim=True) + dlse
    ds = (p * inner).masked_fill(~seen, 0.0)
    size = torch.matmul(dout**2, v.T**2) + (dout * out).pow(2).sum(dim=2, keepdim=True) + dlse**2
    squares = _Terms(p**2, p**2 * size, q**2, k**2, dout**2, scale**2)
    if p_dtype is not None:
        p, ds = (each.to(p_dtype).to(q.dtype) for each in (p, ds))
    return _Terms(p, ds, q, k, dout, scale), squares


def _summed(terms: _Terms, p_dtype: torch.dtype | None) -> Gradients:
    """dq (group, queries, head_dim), dk and dv (keys, head_dim), head by head of the group."""
    product = _product(p_dtype)
    dq = product(terms.ds, terms.k) * terms.scale
    dk = _added_up(product(terms.ds.transpose(1, 2), terms.q)) * terms.scale
    return Gradients(dq, dk, _added_up(product(terms.p.transpose(1, 2), terms.dout)))


def _added_up(of_heads: torch.Tensor) -> torch.Tensor:
    total = of_heads[0]
    for one in of_heads[1:]:
        total = total + one
    return total


def _product(p_dtype: torch.dtype | None) -> Product:
    return product_in_order if p_dtype == torch.float32 else torch.matmul


def _sizes(squares: Gradients) -> Gradients:
    return Gradients(*(each.mean(dim=-1, keepdim=True).sqrt() for each in squares))


def _assembled(problem: Problem, of_groups: Sequence[Gradients]) -> Gradients:
    """Gradients in the problem's layout of those of each KV head, all of a sequence together."""
    p = problem
    dq, dk, dv = (torch.stack(each) for each in zip(*of_groups, strict=True))
    dq = dq.view(p.batch, p.num_heads, p.seqlen_q, dq.shape[-1])
    dk, dv = (t.view(p.batch, p.num_kv_heads, *t.shape[1:]) for t in (dk, dv))
    whole = (dq, dk, dv)
    return Gradients(*((t.transpose(1, 2) for t in whole) if p.layout == "bshd" else whole))


def _rounded(gradients: Gradients, dtype: torch.dtype) -> Gradients:
    return Gradients(*(each.to(dtype) for each in gradients))
