"""Values of what modifies a problem's scores and their softmax, as calls of it are given."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from autoflash.problem import Problem

SOFTCAP = 2.0  # low enough that random scores feel it
DROPOUT_P = 0.3
RNG = -(2**40) - 1, 2**33 + 7  # seed and offset of dropout, of more than 32 bits


def modifiers_for(
    problem: Problem,
    normal: Callable[..., torch.Tensor],
    device: str | torch.device,
    seed: int,
    keys: int | None = None,
    dead_after: Sequence[int] = (),
) -> dict[str, Any]:
    """The modifiers of a call. Slopes are those of ALiBi, steeper from sequence to sequence.

    A bias is the same for all sequences, as one of relative positions is, but in decode, where the
    last query is at another position in each. It has as many `keys` as a cache can hold, and after
    the lengths `dead_after` is full of NaN. The seed is another for each of the inputs'.
    """
    p = problem
    made: dict[str, Any] = {"softcap": SOFTCAP if p.softcap else 0.0}
    if p.alibi:
        heads = torch.arange(1, p.num_heads + 1, device=device, dtype=torch.float32)
        steeper = 1 + torch.arange(p.batch, device=device) / p.batch
        made["alibi_slopes"] = steeper[:, None] * 2 ** (-8 * heads / p.num_heads)
    if p.bias:
        own = p.batch if p.op == "decode" else 1
        made["bias"] = normal(own, p.num_heads, p.seqlen_q, p.seqlen_k if keys is None else keys)
        for b in range(own if dead_after else 0):
            end = dead_after[b] if own > 1 else max(dead_after)
            made["bias"][b, ..., end:] = float("nan")
    if p.sinks:
        made["sinks"] = normal(p.num_heads).float()
    if p.dropout:
        rng = torch.tensor([RNG[0] + seed, RNG[1]])
        made |= {"dropout_p": DROPOUT_P, "rng": rng.to(device)}
    return made
