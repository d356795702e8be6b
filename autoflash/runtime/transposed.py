"""Transposed: a block mask by blocks of keys, as the caller has it or made once of its lists."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from .masks import BlockLists, QueryLists
from .problem import Problem

MOST_TRANSPOSED = 64  # block masks whose lists are kept

# By identity and version of the lists: these, which an id alone would not tell from later ones.
_transposed: dict[tuple[Any, ...], tuple[list[weakref.ref[torch.Tensor]], QueryLists]] = {}


def with_query_lists(problem: Problem, lists: BlockLists) -> BlockLists:
    """The lists with those by blocks of keys; no length is read on the host.

    They are the caller's, where those fit the problem. Others are made once, but in a CUDA graph's
    capture: its replays follow lists that change in place.
    """
    if lists.queries is not None and _fits(problem, lists.queries, lists.kv_indices):
        return lists
    if lists.kv_indices.is_cuda and torch.cuda.is_current_stream_capturing():
        return lists._replace(queries=_made_of(problem, lists))
    given = [each for each in lists.tensors if each is not None]
    blocks = -(-problem.seqlen_k // problem.mask_block_k)
    key = (blocks, *((id(each), _version_of(each)) for each in given))
    found = _transposed.get(key)
    if found is None or any(kept() is not each for kept, each in zip(found[0], given)):
        if len(_transposed) >= MOST_TRANSPOSED:
            _transposed.clear()
        found = [weakref.ref(each) for each in given], _made_of(problem, lists)
        _transposed[key] = found
    return lists._replace(queries=found[1])


def _fits(problem: Problem, queries: QueryLists, indices: torch.Tensor) -> bool:
    """Whether a kernel can read these lists of the problem, which lie where `indices` do."""
    p, blocks = problem, -(-problem.seqlen_k // problem.mask_block_k)
    pairs = (queries[:2], queries[2:])
    if queries.q_num_blocks is None or any((a is None) != (b is None) for a, b in pairs):
        return False
    shapes = {tuple(each.shape) for pair in pairs for each in pair if each is not None}
    heads = {(b, h, blocks) for b in {1, p.batch} for h in {1, p.num_heads}}
    return (
        len({shape[:3] for shape in shapes} & heads) == 1
        and len(shapes) == 2
        and all(
            each.dtype == torch.int32 and each.is_contiguous() and each.device == indices.device
            for each in queries
            if each is not None
        )
    )


def _made_of(problem: Problem, lists: BlockLists) -> QueryLists:
    """The lists by blocks of keys, of those by blocks of queries."""
    blocks = -(-problem.seqlen_k // problem.mask_block_k)
    counts, indices, full_counts, full_indices = lists.tensors
    assert counts is not None and indices is not None
    full: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    if full_counts is not None and full_indices is not None:
        full = _by_columns(full_counts, full_indices, blocks)
    return QueryLists(*_by_columns(counts, indices, blocks), *full)


def _by_columns(
    counts: torch.Tensor, indices: torch.Tensor, blocks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """How many rows list each of so many columns, and which, rising; what does not count is any."""
    live = torch.arange(indices.shape[3], device=indices.device) < counts[..., None]
    places = torch.where(live, indices, blocks).long()  # what does not count in a column of its own
    there = torch.zeros(*counts.shape, blocks + 1, dtype=torch.int32, device=indices.device)
    there = there.scatter_(3, places, 1)[..., :blocks].transpose(2, 3)
    rows = torch.argsort(there, dim=3, descending=True, stable=True)
    return there.sum(dim=3, dtype=torch.int32), rows.int().contiguous()


def _version_of(tensor: torch.Tensor) -> int:
    """What changes when the tensor is written to; one made for inference does not count."""
    return 0 if tensor.is_inference() else tensor._version
