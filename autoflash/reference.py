"""The eager specification of attention: what every kernel is compared with."""

from collections.abc import Sequence
from itertools import groupby

import torch

from autoflash.dropout import dropped
from autoflash.inputs import TORCH_DTYPES, Inputs
from autoflash.runtime.modifiers import modifiers_of
from autoflash.scores import changed_scores
from autoflash.visibility import seen_keys

Row = tuple[int, int, int]  # sequence, query head, query
ROWS_AT_ONCE = 2048  # bounds the fp64 score matrix of a long sequence


def reference(
    inputs: Inputs, softmax_scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in fp64: `out` in the query's layout and `lse` of the inputs' `lse_shape`.

    `lse` is the natural logarithm of the sum of exponentials of the final scores, the sink's among
    them. Rows with no visible key have `out` 0 and `lse` -inf, or the sink.
    """
    return _attention(inputs, softmax_scale, torch.float64, None)


def eager(inputs: Inputs, softmax_scale: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with fp32 scores and sums, P rounded to the input type and the output rounded.

    Its distance from `reference` is the yardstick of the error budget. fp32 inputs leave no error
    but that of the sums, which depends on their order: there they are added in order, as the
    plainest loop does, and not as the library of a device happens to.
    """
    out, lse = _attention(inputs, softmax_scale, torch.float32, TORCH_DTYPES[inputs.problem.dtype])
    return out.to(TORCH_DTYPES[inputs.problem.out_dtype]), lse


def reference_rows(
    inputs: Inputs, rows: Sequence[Row], softmax_scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Single rows of `reference`: `out` (rows, head_dim_v) and `lse` (rows,).

    A row is (sequence, query head, query). What a real size needs: no score matrix is made.
    """
    return _picked_rows(inputs, rows, softmax_scale, torch.float64, None)


def eager_rows(
    inputs: Inputs, rows: Sequence[Row], softmax_scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Single rows of `eager`, likewise."""
    dtype = TORCH_DTYPES[inputs.problem.dtype]
    out, lse = _picked_rows(inputs, rows, softmax_scale, torch.float32, dtype)
    return out.to(TORCH_DTYPES[inputs.problem.out_dtype]), lse


def _attention(
    inputs: Inputs,
    softmax_scale: float | None,
    compute: torch.dtype,
    p_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    problem = inputs.problem
    outs, lses = [], []
    for b in range(problem.batch):
        q, k, v = (t.to(compute) for t in inputs.sequence(b))
        k, v = (t.repeat_interleave(problem.group_size, dim=0) for t in (k, v))
        chunks = [
            _rows(inputs, b, slice(None), rows, q, k, v, softmax_scale, p_dtype)
            for rows in torch.arange(q.shape[1], device=q.device).split(ROWS_AT_ONCE)
        ]
        outs.append(torch.cat([out for out, _ in chunks], dim=1))
        lses.append(torch.cat([lse for _, lse in chunks], dim=1))
    if problem.varlen:
        return torch.cat(outs, dim=1).transpose(0, 1), torch.cat(lses, dim=1)
    out, lse = torch.stack(outs), torch.stack(lses)  # (batch, num_heads, seqlen_q, head_dim_v)
    return (out.transpose(1, 2) if problem.layout == "bshd" else out), lse


def _picked_rows(
    inputs: Inputs,
    rows: Sequence[Row],
    softmax_scale: float | None,
    compute: torch.dtype,
    p_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    problem = inputs.problem
    outs, lses = [], []
    for b, of_sequence in groupby(rows, key=lambda row: row[0]):
        q, k, v = inputs.sequence(b)
        for _, head, i in of_sequence:
            kv_head = head // problem.group_size
            one = (q[head : head + 1], k[kv_head : kv_head + 1], v[kv_head : kv_head + 1])
            row = torch.tensor([i], device=q.device)
            one_q, one_k, one_v = (t.to(compute) for t in one)
            heads, one = slice(head, head + 1), (one_q, one_k, one_v)
            out, lse = _rows(inputs, b, heads, row, *one, softmax_scale, p_dtype)
            outs.append(out[0, 0])
            lses.append(lse[0, 0])
    return torch.stack(outs), torch.stack(lses)


def _rows(
    inputs: Inputs,
    b: int,
    heads: slice,
    rows: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None,
    p_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`out` (heads, rows, head_dim_v) and `lse` (heads, rows) of some rows of sequence `b`.

    q, k and v are those of the `heads` alone.
    """
    problem, queries = inputs.problem, q.shape[1]
    scale = problem.head_dim**-0.5 if softmax_scale is None else softmax_scale
    product = product_in_order if p_dtype == torch.float32 else torch.matmul
    scores = product(q[:, rows], k.transpose(1, 2)) * scale
    modifiers = modifiers_of(problem, inputs.modifiers)
    scores = changed_scores(modifiers, b, heads, rows, queries, k.shape[1], scores)
    every_head = range(*heads.indices(problem.num_heads))
    seen = seen_keys(problem, modifiers.masks, b, every_head, rows, k.shape[1], queries)
    if inputs.page_positions is not None:
        seen = seen & inputs.chosen(b, k.shape[1])
    scores = scores.masked_fill(~seen, float("-inf"))
    if inputs.sinks is not None:  # a key that all see and whose v is 0
        sink = inputs.sinks[heads, None, None].to(scores.dtype)
        scores = torch.cat([scores, sink.expand(-1, len(rows), 1)], dim=2)
        v = torch.cat([v, v.new_zeros(v.shape[0], 1, v.shape[2])], dim=1)
    if not scores.shape[2]:
        shape = (q.shape[0], len(rows))
        return q.new_zeros(*shape, v.shape[2]), q.new_full(shape, float("-inf"))
    lse = scores.logsumexp(dim=2)
    maximum = scores.amax(dim=2, keepdim=True)
    p = (scores - maximum.masked_fill(maximum.isinf(), 0.0)).exp()
    total = p.sum(dim=2, keepdim=True)
    if p_dtype is not None:
        p = p.to(p_dtype).to(v.dtype)
    p = dropped(p, modifiers, b, heads, problem.num_heads, rows)
    return product(p, v) / total.masked_fill(total == 0, 1.0), lse


def product_in_order(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The matrix product, each element summed from the first product to the last."""
    if not a.shape[-1]:
        return torch.matmul(a, b)
    total = a[..., :1] * b[..., :1, :]
    for j in range(1, a.shape[-1]):
        total = total + a[..., j : j + 1] * b[..., j : j + 1, :]
    return total
