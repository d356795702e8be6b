"""Prefill over pages by others, and by ours of the same keys where they lie in order."""

from dataclasses import replace
from types import ModuleType

import torch

from autoflash.inputs import Inputs
from autoflash.peers import ours
from autoflash.peers.contender import Contender
from autoflash.peers.layouts import packed_queries
from autoflash.peers.prefill import flash_attention_3

__all__ = ["flash_attention_3", "in_order", "packed"]


def in_order(module: ModuleType, inputs: list[Inputs]) -> Contender:
    """The module's prefill() of the same queries and keys, packed one after the other."""
    return ours.prefill(module, [packed(one) for one in inputs])


def packed(one: Inputs) -> Inputs:
    """The same sequences without pages."""
    p = one.problem
    gathered = [one.sequence(b)[1:] for b in range(p.batch)]
    k, v = (torch.cat([each.transpose(0, 1) for each in tensors]) for tensors in zip(*gathered))
    q, starts = packed_queries(one)
    assert one.cache_seqlens is not None
    ends = one.cache_seqlens.cumsum(0, dtype=torch.int32)
    tables = {"block_table": None, "cache_seqlens": None}
    tables |= {"cu_seqlens_q": starts, "cu_seqlens_k": torch.nn.functional.pad(ends, (1, 0))}
    problem = replace(p, page_size=0, layout="thd", pages="")
    return replace(one, problem=problem, q=q, k=k, v=v, **tables)
