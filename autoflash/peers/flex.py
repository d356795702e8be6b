"""FlexAttention under a problem's masks and modifiers, by a BlockMask that is made beforehand."""

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask
from torch.nn.attention.flex_attention import flex_attention as flex

from autoflash.inputs import Inputs
from autoflash.peers.abilities import refuse
from autoflash.peers.contender import Contender, Unavailable
from autoflash.peers.layouts import from_layout, in_layout

Rule = Callable[[Any, Any, Any, Any], Any]

HAS = ("window", "right", "softcap", "alibi", "bias", "sinks")
HAS_MASKS = ("blocks", "documents", "prefix", "mask")
# Custom masks as functions of torch: those of benchmarks/workloads/masks.yaml.
RULES: dict[str, Rule] = {"(q_idx - kv_idx) % 4 < 3": lambda b, h, i, j: (i - j) % 4 < 3}


def flex_attention(inputs: list[Inputs]) -> Contender:
    """torch's FlexAttention, compiled for these very shapes."""
    import torch._inductor.config

    p = inputs[0].problem
    refuse(p, has=HAS + HAS_MASKS, unpassed=("packed", "pages", "deterministic"))
    torch._dynamo.reset()  # or the ninth shape would run uncompiled
    torch._inductor.config.compile_threads = 1  # one kernel needs no pool of processes
    compiled = torch.compile(flex if inputs[0].sinks is None else with_sinks, dynamic=False)
    call = functools.partial(compiled, enable_gqa=p.group_size > 1)
    shared = None if p.masks else block_mask_of(inputs[0])  # the same for every set of inputs
    calls = [
        functools.partial(
            call,
            *in_layout(one, "bhsd"),
            *([] if one.sinks is None else [one.sinks]),
            score_mod=changed(one),
            block_mask=block_mask_of(one) if p.masks else shared,
        )
        for one in inputs
    ]
    return Contender(list(calls), from_layout(p, "bhsd"))


def with_sinks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, **more: Any
) -> torch.Tensor:
    """As if each head had a key more that all its queries see, whose values are 0."""
    out, aux = cast(Any, flex)(q, k, v, return_aux=AuxRequest(lse=True), **more)
    return (out * torch.sigmoid(aux.lse - sinks[:, None])[..., None]).to(q.dtype)


def changed(one: Inputs) -> Callable[..., Any] | None:
    """A score as softcap, slopes and a bias leave it, None where none of them does."""
    p, softcap, slopes, bias = one.problem, one.softcap, one.alibi_slopes, one.bias
    if not (p.softcap or p.alibi or p.bias):
        return None
    offset = p.seqlen_k - p.seqlen_q
    if bias is not None:  # by strides: an axis of 1 is read at any index
        bias = bias.expand(p.batch, p.num_heads, p.seqlen_q, p.seqlen_k)

    def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        if slopes is not None:
            score = score - slopes[b, h] * (i + offset - j).abs()
        return score if bias is None else score + bias[b, h, i, j]

    return score_mod


def block_mask_of(one: Inputs) -> BlockMask | None:
    """The mask of the inputs, None where all is seen.

    Raises Unavailable for a custom one that stands in no table here.
    """
    p, lists = one.problem, one.block_mask
    if not (p.causal or p.windowed or p.masks):
        return None
    if lists is not None:
        blocks = (lists.kv_num_blocks, lists.kv_indices)
        blocks += (lists.full_kv_num_blocks, lists.full_kv_indices)
        return BlockMask.from_kv_blocks(
            *blocks,
            BLOCK_SIZE=lists.BLOCK_SIZE,
            mask_mod=rule_of(one),
            seq_lengths=(p.seqlen_q, p.seqlen_k),
        )
    batch = p.batch if p.masked_by in ("documents", "prefix") else None
    return create_block_mask(rule_of(one), batch, None, p.seqlen_q, p.seqlen_k, one.q.device)


def rule_of(one: Inputs) -> Rule:
    """Which keys a query sees, as FlexAttention asks; in blocks, in those that are seen in part."""
    p, ids, prefix = one.problem, one.document_ids, one.prefix_lens
    offset = p.seqlen_k - p.seqlen_q
    left, right = p.window
    custom = RULES.get(p.mask)
    if p.mask and custom is None:
        raise Unavailable(f"nobody wrote {p.mask} for it")

    def rule(b: Any, h: Any, i: Any, j: Any) -> Any:
        seen = j >= 0
        if right >= 0:
            seen = seen & (j <= i + offset + right)
        if left >= 0:
            seen = seen & (j >= i + offset - left)
        if prefix is not None:
            seen = seen | (j < prefix[b])
        if ids is not None:
            seen = seen & (ids[b, i + offset] == ids[b, j])
        return seen if custom is None else seen & custom(b, h, i, j)

    return rule
