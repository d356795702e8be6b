"""Forward: what a prefill leaves to its backward, `out` and `lse`, in fp32 and block by block."""

import torch

from autoflash.mask import visible
from autoflash.problem import Problem

SCORES_AT_ONCE = 2**28  # of a block, 1 GiB in fp32


def forward(
    problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`out` in q's layout and type, and `lse`, fp32 (batch, num_heads, seqlen_q).

    Made for inputs: the reference has its own. q, k and v are in the problem's layout, whose
    modifiers play no part.
    """
    p = problem
    tokens_first = p.layout == "bshd"
    q, k, v = (t.transpose(1, 2) if tokens_first else t for t in (q, k, v))
    out = torch.empty(*q.shape[:3], p.head_dim_v, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], device=q.device)
    at_once = max(1, SCORES_AT_ONCE // (p.group_size * max(1, p.seqlen_k)))
    every_row = torch.arange(p.seqlen_q, device=q.device)
    for b in range(p.batch):
        for kv_head in range(p.num_kv_heads):
            heads = slice(kv_head * p.group_size, (kv_head + 1) * p.group_size)
            keys, values = k[b, kv_head].float(), v[b, kv_head].float()
            for rows in every_row.split(at_once):
                scores = q[b, heads][:, rows].float() @ keys.T * p.head_dim**-0.5
                scores.masked_fill_(~visible(p, rows, p.seqlen_k), float("-inf"))
                of_rows = scores.logsumexp(dim=2)
                shift = of_rows.masked_fill(of_rows.isinf(), 0.0)  # a row without keys
                out[b, heads, rows] = ((scores - shift[..., None]).exp() @ values).to(out.dtype)
                lse[b, heads, rows] = of_rows
    return out.transpose(1, 2) if tokens_first else out, lse
