"""The eager specification of the backward: the gradients that every kernel is compared with.

With P = exp(s - lse) and dP = dout v^T, dS = P (dP - delta + dlse) where delta = rowsum(dout out);
then dv = P^T dout, dq = scale dS k and dk = scale dS^T q, summed over the heads of a group
(FlashAttention-2, algorithm 2). With a softcap dq and dk take dS times its slope. The gradient of a
bias is dS, summed over what shares it; that of a sink, whose v is 0, the sum over the rows of
exp(sink - lse) (dlse - delta). With dropout P and dP are multiplied by its weights Z, where out and
dv are made of P and dS of dP: dS = P (Z dP - delta + dlse), dv = (Z P)^T dout.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import torch

from autoflash.dropout import dropout_weights
from autoflash.forward import lse_of_sequence, of_sequence
from autoflash.inputs import TORCH_DTYPES, Inputs, packed_lengths
from autoflash.problem import Problem
from autoflash.reference import Row, eager, product_in_order, reference
from autoflash.runtime.modifiers import modifiers_of
from autoflash.scores import changed_scores, softcap_slope
from autoflash.visibility import seen_keys

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Gradients(NamedTuple):
    """Of q, k and v, each in its tensor's layout; or single rows of them, (rows, its channels)."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


class ModifierGradients(NamedTuple):
    """Of a bias, four axes of which those are 1 that share it, and of sinks, (num_heads,).

    None where there is no such modifier, or nobody asks.
    """

    dbias: torch.Tensor | None = None
    dsinks: torch.Tensor | None = None


def reference_gradients(
    inputs: Inputs, softmax_scale: float | None = None
) -> tuple[Gradients, Gradients]:
    """The gradients in fp64 with a forward of their own, and the size of each of their numbers.

    A size is the root of the sum of the squares of all the terms that a number sums: what it would
    be on average if their signs were random. Of one whose terms cancel, as of a query that sees
    one key, it says what rounding is to be compared with; where none see each other it is 0.
    """
    out, lse = reference(inputs, softmax_scale)
    whole = _whole(replace(inputs, out=out, lse=lse), softmax_scale, torch.float64, None)
    return whole[0].gradients, whole[1].gradients


def reference_modifier_gradients(
    inputs: Inputs, softmax_scale: float | None = None
) -> tuple[ModifierGradients, ModifierGradients]:
    """The same of the modifiers."""
    out, lse = reference(inputs, softmax_scale)
    given = replace(inputs, out=out, lse=lse)
    whole = _whole(given, softmax_scale, torch.float64, None)
    if inputs.sinks is None:
        return ModifierGradients(whole[0].dbias), ModifierGradients(whole[1].dbias)
    terms, squares = sink_terms(given)
    return (
        ModifierGradients(whole[0].dbias, terms.sum(dim=1)),
        ModifierGradients(whole[1].dbias, squares.sum(dim=1).sqrt()),
    )


def eager_gradients(inputs: Inputs, softmax_scale: float | None = None) -> Gradients:
    """The same in fp32 with P, dS and the results rounded to the input type, after `eager`'s out.

    fp32 inputs are summed in order, as in `eager`.
    """
    dtype = TORCH_DTYPES[inputs.problem.dtype]
    out, lse = eager(inputs, softmax_scale)
    given = replace(inputs, out=out, lse=lse)
    return _rounded(_whole(given, softmax_scale, torch.float32, dtype)[0].gradients, dtype)


def eager_modifier_gradients(
    inputs: Inputs, softmax_scale: float | None = None
) -> ModifierGradients:
    """The same of the modifiers, of dS that nobody rounded, in the types of the modifiers."""
    dtype = TORCH_DTYPES[inputs.problem.dtype]
    out, lse = eager(inputs, softmax_scale)
    given = replace(inputs, out=out, lse=lse)
    dbias = _whole(given, softmax_scale, torch.float32, dtype)[0].dbias
    return ModifierGradients(
        None if dbias is None or inputs.bias is None else dbias.to(inputs.bias.dtype),
        None if inputs.sinks is None else sink_terms(given)[0].sum(dim=1).to(inputs.sinks.dtype),
    )


def sink_terms(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """What each row adds to dsinks, (num_heads, rows of all sequences), and its size squared.

    Of the inputs' own `out` and `lse`, in the latter's type.
    """
    p = inputs.problem
    assert inputs.out is not None and inputs.dout is not None
    assert inputs.lse is not None and inputs.sinks is not None
    compute = inputs.lse.dtype

    def heads_first(of_rows: torch.Tensor, heads: int) -> torch.Tensor:
        return of_rows.movedim(heads, 0).flatten(1)

    heads = {"thd": 1, "bshd": 2, "bhsd": 1}[p.layout]
    products = inputs.dout.to(compute) * inputs.out.to(compute)
    delta = heads_first(products.sum(dim=-1), heads)
    size = heads_first(products.pow(2).sum(dim=-1), heads)
    lse = heads_first(inputs.lse, 0 if p.varlen else 1)
    dlse = torch.zeros_like(lse)
    if inputs.dlse is not None:
        dlse = heads_first(inputs.dlse, 0 if p.varlen else 1).to(compute)
    weights = (inputs.sinks[:, None].to(compute) - lse).exp().masked_fill(lse.isinf(), 0.0)
    return weights * (dlse - delta), weights**2 * (dlse**2 + size)


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
    queries, keys = [p.seqlen_q] * p.batch, [p.seqlen_k] * p.batch
    if p.varlen:
        queries, keys = packed_lengths(p)
    return [
        (b, head // p.group_size, max(0, i * (keys[b] - 1) // max(1, queries[b] - 1)))
        for b, head, i in rows
    ]


@dataclass(frozen=True)
class _Group:
    """A KV head of sequence `b` and its query heads: q, out, dout (group, queries, channels)."""

    inputs: Inputs
    b: int
    heads: slice
    q: torch.Tensor
    k: torch.Tensor  # (keys, channels), as v, which may have others
    v: torch.Tensor
    out: torch.Tensor
    dout: torch.Tensor
    lse: torch.Tensor  # (group, queries), as dlse
    dlse: torch.Tensor


def _group_of(inputs: Inputs, b: int, kv_head: int, compute: torch.dtype) -> _Group:
    p, ends = inputs.problem, inputs.cu_seqlens_q
    assert inputs.out is not None and inputs.dout is not None and inputs.lse is not None
    heads = slice(kv_head * p.group_size, (kv_head + 1) * p.group_size)
    q, out, dout = (
        of_sequence(p, ends, b, t)[heads].to(compute) for t in (inputs.q, inputs.out, inputs.dout)
    )
    k, v = (
        of_sequence(p, inputs.cu_seqlens_k, b, t)[kv_head].to(compute) for t in (inputs.k, inputs.v)
    )
    lse = lse_of_sequence(ends, b, inputs.lse)[heads].to(compute)
    dlse = torch.zeros_like(lse)
    if inputs.dlse is not None:
        dlse = lse_of_sequence(ends, b, inputs.dlse)[heads].to(compute)
    return _Group(inputs, b, heads, q, k, v, out, dout, lse, dlse)


class _Whole(NamedTuple):
    gradients: Gradients
    dbias: torch.Tensor | None


def _whole(
    inputs: Inputs, softmax_scale: float | None, compute: torch.dtype, p_dtype: torch.dtype | None
) -> tuple[_Whole, _Whole]:
    """All gradients, and their sizes."""
    p = inputs.problem
    scale = p.head_dim**-0.5 if softmax_scale is None else softmax_scale
    every = slice(None)
    found, of_bias = [], [_zeros(inputs, compute), _zeros(inputs, compute)]
    for b in range(p.batch):
        found.append([])
        for kv_head in range(p.num_kv_heads):
            group = _group_of(inputs, b, kv_head, compute)
            terms = _terms(group, every, every, scale, p_dtype)
            found[-1].append([_summed(one, p_dtype) for one in terms])
            for dbias, one in zip(of_bias, terms, strict=True):
                _add_to_bias(dbias, group, one.of_scores)
    of_gradients, squares = ([[pair[n] for pair in of_b] for of_b in found] for n in (0, 1))
    sizes = [[_sizes(each) for each in of_b] for of_b in squares]
    dbias, square = of_bias
    size = None if square is None else square.sqrt()
    return _Whole(_assembled(p, of_gradients), dbias), _Whole(_assembled(p, sizes), size)


def _zeros(inputs: Inputs, compute: torch.dtype) -> torch.Tensor | None:
    """A dbias to be added to, four axes."""
    if inputs.bias is None:
        return None
    shape = (1,) * (4 - inputs.bias.dim()) + inputs.bias.shape
    return torch.zeros(shape, dtype=compute, device=inputs.bias.device)


def _add_to_bias(dbias: torch.Tensor | None, group: _Group, part: torch.Tensor) -> None:
    """Add the gradients of one group's scores, summed over what shares a bias."""
    if dbias is None:
        return
    batches, heads, *own = dbias.shape
    for axis, size in enumerate((heads, *own)):
        part = part.sum(dim=axis, keepdim=True) if size == 1 else part
    of_heads = dbias[group.b if batches > 1 else 0][group.heads if heads > 1 else slice(None)]
    of_heads[:, : part.shape[1], : part.shape[2]] += part  # of packed sequences some are shorter


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
        across = _terms(group, queries, every, scale, p_dtype)
        down = _terms(group, every, keys, scale, p_dtype)
        gradients, squares = (
            Gradients(_summed(a, p_dtype).dq[heads, own], *_summed(d, p_dtype)[1:])
            for a, d in zip(across, down, strict=True)
        )
        found.append((gradients, _sizes(squares)))
    parts = [Gradients(*map(torch.cat, zip(*each, strict=True))) for each in zip(*found)]
    return parts[0], parts[1]


class _Terms(NamedTuple):
    """What is multiplied and summed to gradients: p, dropped, and ds are (group, queries, keys).

    `of_scores` is the gradient of the final scores, `ds` that of the scaled products.
    """

    p: torch.Tensor
    of_scores: torch.Tensor
    ds: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    dout: torch.Tensor
    scale: float


def _terms(
    group: _Group,
    queries: slice | torch.Tensor,
    keys: slice | torch.Tensor,
    scale: float,
    p_dtype: torch.dtype | None,
) -> tuple[_Terms, _Terms]:
    """The terms of some queries and keys, and the squares of the parts of each."""
    problem, product = group.inputs.problem, _product(p_dtype)
    modifiers = modifiers_of(problem, group.inputs.modifiers)
    q, dout, out = (t[:, queries] for t in (group.q, group.dout, group.out))
    k, v = group.k[keys], group.v[keys]
    lse, dlse = (t[:, queries, None] for t in (group.lse, group.dlse))
    sizes = (group.q.shape[1], group.k.shape[0])
    rows = torch.arange(sizes[0], device=q.device)[queries]
    of_group = range(group.heads.start, group.heads.stop)
    asked = (group.b, of_group, rows, sizes[1], sizes[0], keys)
    seen = seen_keys(problem, modifiers.masks, *asked) & ~lse.isinf()
    scaled = product(q, k.T) * scale
    scores = changed_scores(modifiers, group.b, group.heads, queries, *sizes, scaled, keys)
    p = (scores - lse).exp().masked_fill(~seen, 0.0)
    columns = torch.arange(sizes[1], device=q.device)[keys]
    weights = dropout_weights(
        modifiers, group.b, group.heads, problem.num_heads, rows, columns, p.dtype
    )
    inner = product(dout, v.T) * weights - (dout * out).sum(dim=2, keepdim=True) + dlse
    of_scores = (p * inner).masked_fill(~seen, 0.0)
    slope = softcap_slope(modifiers, scaled)
    ds = of_scores * slope
    size = (
        torch.matmul(dout**2, v.T**2) * weights**2
        + (dout * out).pow(2).sum(dim=2, keepdim=True)
        + dlse**2
    )
    size = (p**2 * size).masked_fill(~seen, 0.0)
    kept = p * weights
    squares = _Terms(kept**2, size, size * slope**2, q**2, k**2, dout**2, scale**2)
    if p_dtype is not None:
        kept, ds = (each.to(p_dtype).to(q.dtype) for each in (kept, ds))
    return _Terms(kept, of_scores, ds, q, k, dout, scale), squares


def _summed(terms: _Terms, p_dtype: torch.dtype | None) -> Gradients:
    """dq (group, queries, channels), dk and dv (keys, channels), head by head of the group."""
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
    return Gradients(*(each.sqrt() for each in squares))


def _assembled(problem: Problem, of_groups: Sequence[Sequence[Gradients]]) -> Gradients:
    """Gradients in the problem's layout of those of each KV head of each sequence."""
    sequences = []
    for of_heads in of_groups:
        dq, dk, dv = zip(*of_heads, strict=True)
        sequences.append((torch.cat(dq), torch.stack(dk), torch.stack(dv)))  # heads first
    each = zip(*sequences, strict=True)
    if problem.varlen:
        return Gradients(*(torch.cat(parts, dim=1).transpose(0, 1) for parts in each))
    whole = [torch.stack(parts) for parts in each]
    return Gradients(*((t.transpose(1, 2) for t in whole) if problem.layout == "bshd" else whole))


def _rounded(gradients: Gradients, dtype: torch.dtype) -> Gradients:
    return Gradients(*(each.to(dtype) for each in gradients))
