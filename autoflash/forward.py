"""Forward: what a prefill leaves to its backward, `out` and `lse`, in fp32 and block by block."""

import torch

from autoflash.dropout import dropped
from autoflash.problem import Problem
from autoflash.runtime.modifiers import NO_MODIFIERS, Modifiers, modifiers_of
from autoflash.scores import changed_scores
from autoflash.visibility import seen_keys

SCORES_AT_ONCE = 2**28  # of a block, 1 GiB in fp32


def forward(
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    modifiers: Modifiers = NO_MODIFIERS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`out` in q's layout and type, and `lse`, fp32 (batch, num_heads, seqlen_q).

    Of packed sequences `lse` is (num_heads, total_q). Made for inputs: the reference has its own.
    q, k and v are in the problem's layout, `modifiers` as prefill() takes them.
    """
    p, whole = problem, modifiers_of(problem, modifiers)
    out = torch.empty(*q.shape[:-1], p.head_dim_v, dtype=q.dtype, device=q.device)
    shape = (p.num_heads, len(q)) if p.varlen else (p.batch, p.num_heads, p.seqlen_q)
    lse = torch.empty(shape, device=q.device)
    for b in range(p.batch):
        own_q, own_out = (of_sequence(p, modifiers.cu_seqlens_q, b, t) for t in (q, out))
        own_k, own_v = (of_sequence(p, modifiers.cu_seqlens_k, b, t) for t in (k, v))
        own_lse = lse_of_sequence(modifiers.cu_seqlens_q, b, lse)
        queries, keys = own_q.shape[1], own_k.shape[1]
        at_once = max(1, SCORES_AT_ONCE // (p.group_size * max(1, keys)))
        for kv_head in range(p.num_kv_heads):
            heads = slice(kv_head * p.group_size, (kv_head + 1) * p.group_size)
            head_k, head_v = own_k[kv_head].float(), own_v[kv_head].float()
            for rows in torch.arange(queries, device=q.device).split(at_once):
                scores = own_q[heads][:, rows].float() @ head_k.T * p.head_dim**-0.5
                scores = changed_scores(whole, b, heads, rows, queries, keys, scores)
                of_group = range(heads.start, heads.stop)
                seen = seen_keys(p, modifiers.masks, b, of_group, rows, keys, queries)
                scores.masked_fill_(~seen, float("-inf"))
                of_rows = scores.logsumexp(dim=2)
                if modifiers.sinks is not None:
                    of_rows = of_rows.logaddexp(modifiers.sinks[heads, None].float())
                shift = of_rows.masked_fill(of_rows.isinf(), 0.0)  # a row without keys
                weights = (scores - shift[..., None]).exp()
                weighted = dropped(weights, whole, b, heads, p.num_heads, rows) @ head_v
                own_out[heads, rows] = weighted.to(out.dtype)
                own_lse[heads, rows] = of_rows
    return out, lse


def of_sequence(
    problem: Problem, cu_seqlens: torch.Tensor | None, b: int, tensor: torch.Tensor
) -> torch.Tensor:
    """Sequence `b` of q, k, v or what is like them: (heads, tokens, channels), a view."""
    if cu_seqlens is not None:
        return tensor[slice(*cu_seqlens[b : b + 2].tolist())].transpose(0, 1)
    return tensor[b].transpose(0, 1) if problem.layout == "bshd" else tensor[b]


def lse_of_sequence(cu_seqlens_q: torch.Tensor | None, b: int, lse: torch.Tensor) -> torch.Tensor:
    """Sequence `b` of `lse` or `dlse`: (num_heads, queries), a view."""
    return lse[b] if cu_seqlens_q is None else lse[:, slice(*cu_seqlens_q[b : b + 2].tolist())]
