"""Structures of masks for a problem: blocks, documents and prefixes drawn for its density."""

import random
from collections.abc import Sequence

import torch

from autoflash.problem import Problem
from autoflash.runtime.masks import BlockLists

DEAD_BLOCK = 2**30  # an index that must never be followed
OWN_BLOCKS = 0.05  # of a head's in decode: what a group's heads list is about the same
DEAD_ID = -(2**31)  # of a document that no key is of


def document_lengths(
    problem: Problem, seed: int = 0, lengths: Sequence[int] | None = None
) -> list[list[int]]:
    """The keys of each document of each sequence, each about `density` percent of all.

    A sequence has `seqlen_k` keys unless `lengths` says otherwise.
    """
    p, sequences = problem, []
    for b, keys in enumerate([p.seqlen_k] * p.batch if lengths is None else lengths):
        number = min(max(1, round(100 / p.density)), max(1, keys))
        drawn = random.Random(f"{seed} {b}")
        # of even lengths in one sequence, so that density is what it is said to be, then of any
        even = [round(n * keys / number) for n in range(1, number)]
        cuts = even if b == 0 else sorted(drawn.randrange(keys + 1) for _ in even)
        if p.op == "decode" and p.seqlen_q > 1 and b % 2 and cuts:
            last = keys - 1  # the step's tokens are of two documents
            cuts = [*(min(cut, last) for cut in cuts[:-1]), last]
        sequences.append([end - start for start, end in zip((0, *cuts), (*cuts, keys))])
    return sequences


def document_ids(
    problem: Problem,
    seed: int = 0,
    lengths: Sequence[int] | None = None,
    width: int | None = None,
    poison: bool = False,
) -> torch.Tensor:
    """int32 (batch, seqlen_k), rising from document to document.

    Of a cache (batch, width): after a sequence's last key they go on, or with `poison` are no
    document's.
    """
    rows = []
    for each in document_lengths(problem, seed, lengths):
        ids = torch.repeat_interleave(torch.arange(len(each)), torch.tensor(each))
        if width is not None:
            dead = DEAD_ID if poison or not len(ids) else int(ids[-1])
            ids = torch.cat([ids, ids.new_full((width - len(ids),), dead)])
        rows.append(ids)
    return torch.stack(rows).int()


def prefix_lens(
    problem: Problem, seed: int = 0, lengths: Sequence[int] | None = None
) -> torch.Tensor:
    """int32 (batch,): `density` percent of the keys in the first sequence, then up to twice it.

    In a step they end among its own tokens, or just past them: elsewhere they change nothing.
    """
    p = problem
    first = p.seqlen_k * p.density // 100
    drawn = random.Random(seed)
    if p.op == "decode" and lengths is not None:
        ends = [keys + 2 - drawn.randint(0, p.seqlen_q + 1) for keys in lengths]
        return torch.tensor([max(0, end) for end in ends]).int()
    return torch.tensor([first, *(drawn.randint(0, 2 * first) for _ in range(1, p.batch))]).int()


def block_lists(
    problem: Problem, seed: int = 0, poison: bool = True, width: int | None = None
) -> BlockLists:
    """Random blocks, half of them whole, of each head of each sequence.

    Under causal those above the diagonal are not there, and those on it are not whole. With
    `poison` entries past the last that counts are such as must not be followed. In decode they are
    of the `width` keys that a cache can hold, in no order, and the heads of a group list about the
    same ones.
    """
    p = problem
    keys = p.seqlen_k if width is None else width
    rows, columns = -(-p.seqlen_q // p.mask_block_q), -(-keys // p.mask_block_k)
    shape = (p.batch, p.num_heads, rows, columns)
    generator = torch.Generator().manual_seed(seed)
    there = torch.rand(shape, generator=generator) < p.density / 100
    whole = torch.rand(shape, generator=generator) < 0.5
    order = torch.arange(columns)
    if p.op == "decode":
        own = torch.rand(shape, generator=generator) < OWN_BLOCKS
        there = torch.where(own, there, there[:, torch.arange(p.num_heads) // p.group_size])
        order = torch.randperm(columns, generator=generator)
    elif p.causal:
        first_p = torch.arange(rows)[:, None] * p.mask_block_q + p.seqlen_k - p.seqlen_q
        first_key = torch.arange(columns)[None] * p.mask_block_k
        there &= first_key < first_p + p.mask_block_q
        whole &= first_key + p.mask_block_k - 1 <= first_p
    lists = (*_listed(there & ~whole, order, poison), *_listed(there & whole, order, poison))
    return BlockLists(*lists, (p.mask_block_q, p.mask_block_k))


def masks_of(
    problem: Problem,
    device: str | torch.device,
    seed: int,
    poison: bool,
    lengths: Sequence[int] | None = None,
    width: int | None = None,
) -> dict:
    """What a problem's inputs have of these, on the device; by the names of Inputs.

    Of a cache `lengths` are those of its sequences, and ids are for `width` keys of each.
    """
    p = problem
    made: dict = {}
    if p.masked_by == "documents":
        made["document_ids"] = document_ids(p, seed, lengths, width, poison).to(device)
    if p.masked_by == "prefix":
        made["prefix_lens"] = prefix_lens(p, seed, lengths).to(device)
    if p.masked_by == "blocks":
        lists = block_lists(p, seed, poison, width)
        made["block_mask"] = lists._replace(
            **{name: getattr(lists, name).to(device) for name in BlockLists._fields[:4]}
        )
    return made


def _listed(
    there: torch.Tensor, columns: torch.Tensor, poison: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """How many blocks of each row there are, and the columns as they are ordered, those first."""
    counts, there = there.sum(dim=-1, dtype=torch.int32), there[..., columns]
    order = columns[torch.argsort(there.int(), dim=-1, descending=True, stable=True)].int()
    if poison:
        order.masked_fill_(torch.arange(there.shape[-1]) >= counts[..., None], DEAD_BLOCK)
    return counts, order
