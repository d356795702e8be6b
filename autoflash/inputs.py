"""Seeded inputs of a problem: random values, tables of pages, ragged lengths, poisoned slots."""

from dataclasses import dataclass

import torch

from autoflash.problem import Problem

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
POISON_PAGE = 2**30  # an id that must never be dereferenced


@dataclass(frozen=True)
class Inputs:
    """The tensors of one call.

    Prefill: q, k, v in the problem's layout. Decode: q is (batch, seqlen_q, num_heads, head_dim),
    k and v are the caches in the problem's kv_layout; `cache_seqlens` is (batch,) int32 and
    `block_table` (batch, max_pages) int32 when paged.
    """

    problem: Problem
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cache_seqlens: torch.Tensor | None = None
    block_table: torch.Tensor | None = None

    def sequence(self, b: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sequence `b` gathered: q (num_heads, seqlen_q, head_dim), k and v (kv heads, keys, d)."""
        p = self.problem
        if p.op == "prefill":
            heads_first = (
                (lambda t: t[b].transpose(0, 1)) if p.layout == "bshd" else (lambda t: t[b])
            )
            return heads_first(self.q), heads_first(self.k), heads_first(self.v)
        assert self.cache_seqlens is not None
        keys = int(self.cache_seqlens[b])
        k, v = (self._cached(cache, b, keys) for cache in (self.k, self.v))
        return self.q[b].transpose(0, 1), k, v

    def _cached(self, cache: torch.Tensor, b: int, keys: int) -> torch.Tensor:
        """The first `keys` tokens of sequence `b` in a cache: (kv heads, keys, d)."""
        tokens_first = cache.transpose(1, 2) if self.problem.kv_layout == "hnd" else cache
        if self.block_table is None:
            return tokens_first[b, :keys].transpose(0, 1)
        pages = -(-keys // self.problem.page_size)
        ids = self.block_table[b, :pages].long()
        return tokens_first[ids].flatten(0, 1)[:keys].transpose(0, 1)


def sequence_lengths(problem: Problem, seed: int = 0) -> list[int]:
    """The valid tokens of each sequence: all `seqlen_k`, or ragged in [seqlen_k / 8, seqlen_k].

    The first ragged sequence is the longest, so that a table's width is the same for every seed.
    """
    if problem.lengths == "equal":
        return [problem.seqlen_k] * problem.batch
    generator = torch.Generator().manual_seed(seed)
    low = problem.seqlen_k // 8
    drawn = torch.randint(low, problem.seqlen_k + 1, (problem.batch,), generator=generator)
    return [problem.seqlen_k, *drawn.tolist()[1:]]


def shared_tokens(problem: Problem) -> int:
    """How many first tokens all sequences have in common: whole pages of half of `seqlen_k`."""
    if problem.pages != "shared":
        return 0
    return problem.seqlen_k // 2 // problem.page_size * problem.page_size


def make_inputs(
    problem: Problem,
    seed: int = 0,
    device: str | torch.device = "cpu",
    lengths: list[int] | None = None,
    poison: bool = True,
    wide_rows: int = 0,
    scale: float = 1.0,
) -> Inputs:
    """Random normal inputs of the problem, times `scale`.

    `lengths` replaces the drawn valid tokens of each sequence (decode). `poison` fills dead cache
    slots with NaN and dead block-table entries with 2**30. `wide_rows` makes each of q, k, v a view
    of rows that many elements wider, the rest NaN; an odd number leaves rows unaligned. On device
    "meta" the tensors have shapes and strides only.
    """
    meta = torch.device(device).type == "meta"
    generator = None if meta else torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        width = shape[-1] + wide_rows
        dtype = TORCH_DTYPES[problem.dtype]
        storage = torch.empty((*shape[:-1], width), device=device, dtype=dtype)
        view = storage[..., : shape[-1]]
        if wide_rows:
            storage.fill_(float("nan"))
        if meta:
            return view
        if scale == 1.0 and not wide_rows:
            return storage.normal_(generator=generator)
        view.copy_(torch.randn(shape, device=device, generator=generator) * scale)
        return view

    p = problem
    if p.op == "prefill":
        order = (0, 1, 2, 3) if p.layout == "bshd" else (0, 2, 1, 3)

        def tensor(seqlen: int, heads: int, head_dim: int) -> torch.Tensor:
            shape = (p.batch, seqlen, heads, head_dim)
            return normal(*(shape[axis] for axis in order))

        q = tensor(p.seqlen_q, p.num_heads, p.head_dim)
        k = tensor(p.seqlen_k, p.num_kv_heads, p.head_dim)
        return Inputs(p, q, k, tensor(p.seqlen_k, p.num_kv_heads, p.head_dim_v))
    q = normal(p.batch, p.seqlen_q, p.num_heads, p.head_dim)
    valid = torch.tensor(lengths if lengths is not None else sequence_lengths(p, seed))
    block_table = None
    if p.paged:
        width = max(1, -(-max(p.seqlen_k, int(valid.max())) // p.page_size))
        block_table = _page_ids(p, width, seed).to(device=device, dtype=torch.int32)
        slots = (p.batch * width, p.page_size)
    else:
        slots = (p.batch, max(1, p.seqlen_k))

    def cache(head_dim: int) -> torch.Tensor:
        if p.kv_layout == "nhd":
            return normal(*slots, p.num_kv_heads, head_dim)
        return normal(slots[0], p.num_kv_heads, slots[1], head_dim)

    k, v = cache(p.head_dim), cache(p.head_dim_v)
    cache_seqlens = valid.to(device=device, dtype=torch.int32)
    if poison:
        for tensor_ in (k, v):
            tokens_first = tensor_.transpose(1, 2) if p.kv_layout == "hnd" else tensor_
            _poison_dead_slots(tokens_first, cache_seqlens, block_table)
        if block_table is not None:
            used = -(-cache_seqlens // p.page_size)
            columns = torch.arange(block_table.shape[1], device=device)
            block_table = block_table.masked_fill(columns[None] >= used[:, None], POISON_PAGE)
    return Inputs(p, q, k, v, cache_seqlens, block_table)


def _page_ids(problem: Problem, width: int, seed: int) -> torch.Tensor:
    """The page ids of each sequence, (batch, width); no page of the cache is in two places of it.

    Those that are shared are the first sequence's.
    """
    ids = torch.arange(problem.batch * width)
    if problem.pages != "contiguous":
        ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))]
    ids = ids.view(problem.batch, width)
    shared = shared_tokens(problem) // problem.page_size
    ids[:, :shared] = ids[0, :shared]
    return ids


def _poison_dead_slots(
    cache: torch.Tensor, cache_seqlens: torch.Tensor, block_table: torch.Tensor | None
) -> None:
    """Write NaN into every slot of `cache` (pages or batch, tokens, kv heads, d) past a length."""
    tokens = torch.arange(cache.shape[1], device=cache.device)
    if block_table is None:
        dead = tokens[None] >= cache_seqlens[:, None]
    else:
        first = torch.arange(block_table.shape[1], device=cache.device) * cache.shape[1]
        position = first[None, :, None] + tokens[None, None]  # (1, columns, tokens)
        slot = block_table.long()[:, :, None] * cache.shape[1] + tokens
        dead = torch.ones(cache.shape[:2], dtype=torch.bool, device=cache.device)
        dead.view(-1)[slot[position < cache_seqlens[:, None, None]]] = False
    cache[dead] = float("nan")
