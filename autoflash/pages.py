"""Pages: where those of a cache's sequences lie, which of them are read, which slots are dead."""

from collections.abc import Sequence

import torch

from autoflash.problem import Problem
from autoflash.runtime.problem import CHOSEN

NOWHERE = 2**40  # past the end of every sequence
POISON_PAGE = 2**30  # an id that must never be dereferenced


def shared_tokens(problem: Problem) -> int:
    """How many first tokens all sequences have in common: whole pages of half of `seqlen_k`."""
    if problem.pages != "shared":
        return 0
    return problem.seqlen_k // 2 // problem.page_size * problem.page_size


def page_ids(problem: Problem, width: int, seed: int) -> torch.Tensor:
    """The page ids of each sequence, (batch, width); no page of the cache is in two places of it.

    Those that are shared are the first sequence's.
    """
    ids = torch.arange(problem.batch * width)
    if problem.pages != "contiguous":
        ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))]
    ids = ids.view(problem.batch, width)
    shared = shared_tokens(problem) // problem.page_size
    ids[1:, :shared] = ids[0, :shared]
    return ids


def page_places(problem: Problem, width: int, lengths: Sequence[int], seed: int) -> torch.Tensor:
    """Which page of its sequence each entry of the table is, (batch, width) int32; -1 none.

    Of chosen pages half of a sequence's or `width`, in any order, its last one always.
    """
    if problem.pages != CHOSEN:
        return torch.arange(width, dtype=torch.int32).expand(problem.batch, width)
    generator = torch.Generator().manual_seed(seed)
    places = torch.full((problem.batch, width), -1, dtype=torch.int32)
    for b, keys in enumerate(lengths):
        pages = -(-keys // problem.page_size)
        count = min(width, -(-pages // 2))
        if count:
            others = torch.randperm(pages - 1, generator=generator)[: count - 1]
            columns = torch.randperm(width, generator=generator)[:count]
            places[b, columns] = torch.tensor([*others.tolist(), pages - 1], dtype=torch.int32)
    return places


def dead_slots(
    cache: torch.Tensor,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor | None,
    places: torch.Tensor | None,
) -> torch.Tensor:
    """Which slots of `cache` (pages or batch, tokens, ...) lie past every length."""
    tokens = torch.arange(cache.shape[1], device=cache.device)
    if block_table is None or places is None:
        return tokens[None] >= cache_seqlens[:, None]
    first = torch.where(places < 0, NOWHERE, places.long() * cache.shape[1])
    position = first[:, :, None] + tokens[None, None]  # (batch, columns, tokens)
    slot = block_table.long()[:, :, None] * cache.shape[1] + tokens
    dead = torch.ones(cache.shape[:2], dtype=torch.bool, device=cache.device)
    dead.view(-1)[slot[position < cache_seqlens[:, None, None]]] = False
    return dead
