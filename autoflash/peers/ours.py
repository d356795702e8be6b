"""Ours: the exported module as a contender, called as its users call it."""

import functools
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from autoflash.inputs import Inputs
from autoflash.peers.contender import Contender
from autoflash.problem import Problem
from autoflash.runtime.problem import CHOSEN


def prefill(module: ModuleType, inputs: list[Inputs]) -> Contender:
    """The module's prefill(), with what the problem has of windows, modifiers and packing."""
    p = inputs[0].problem
    ours = functools.partial(module.prefill, causal=p.causal, layout=p.layout)
    return Contender(
        [functools.partial(ours, one.q, one.k, one.v, **_beside_the_plain(one)) for one in inputs]
    )


def decode(module: ModuleType, hints: Mapping[str, Any], inputs: list[Inputs]) -> Contender:
    """The module's decode(), likewise; a single query token without an axis of its own."""
    one_token = inputs[0].problem.seqlen_q == 1
    calls = [
        functools.partial(
            module.decode,
            one.q[:, 0] if one_token else one.q,
            one.k,
            None if one.problem.latent else one.v,
            one.cache_seqlens,
            block_table=one.block_table,
            kv_layout=one.problem.kv_layout,
            k_scale=one.k_scale,
            v_scale=one.v_scale,
            **_beside_the_plain(one),
            **hints,
        )
        for one in inputs
    ]
    return Contender(list(calls), lambda out: out.unsqueeze(1) if one_token else out)


def hints_of(problem: Problem) -> dict[str, Any]:
    """What a host that makes the call knows of its lengths and pages."""
    told: dict[str, Any] = {"max_seqlen_k": problem.seqlen_k, "lengths": problem.lengths}
    hinted = problem.paged and problem.pages != CHOSEN
    return told | ({"pages": problem.pages} if hinted else {})


def _beside_the_plain(one: Inputs) -> dict[str, Any]:
    """The arguments of what the problem has beside the plain ones."""
    p = one.problem
    given: dict[str, Any] = {}
    if p.windowed:
        given["window"] = (p.window_left, p.window_right)
    if p.varlen:
        given |= {"cu_seqlens_q": one.cu_seqlens_q, "cu_seqlens_k": one.cu_seqlens_k}
        given |= {"max_seqlen_q": p.seqlen_q, "max_seqlen_k": p.seqlen_k}
    if p.paged and p.op == "prefill":
        given |= {"cache_seqlens": one.cache_seqlens, "block_table": one.block_table}
        given |= {"kv_layout": p.kv_layout, "max_seqlen_k": p.seqlen_k}
    if one.page_positions is not None:
        given["page_positions"] = one.page_positions
    names = {"softcap": p.softcap, "alibi_slopes": p.alibi, "bias": p.bias, "sinks": p.sinks}
    names |= {"dropout_p": p.dropout, "rng": p.dropout}
    given |= {name: getattr(one, name) for name, on in names.items() if on}
    masks = one.modifiers._asdict() if p.masks else {}
    names = ("block_mask", "document_ids", "prefix_lens", "mask", "density")
    return given | {name: masks[name] for name in names if masks.get(name) is not None}
