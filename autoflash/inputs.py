"""Seeded inputs of a problem: random values, tables of pages, ragged lengths, poisoned slots."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autoflash.forward import forward, of_sequence
from autoflash.modifier_values import modifiers_for
from autoflash.pages import POISON_PAGE, dead_slots, page_ids, page_places
from autoflash.problem import Problem
from autoflash.quantised import QUANTISED_DTYPES, dequantised, quantised, spoil
from autoflash.runtime.masks import BlockLists
from autoflash.runtime.modifiers import Modifiers
from autoflash.runtime.problem import CHOSEN
from autoflash.structures import masks_of

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
KV_TORCH_DTYPES = {**TORCH_DTYPES, **QUANTISED_DTYPES}
Lengths = Sequence[int | tuple[int, int]]  # tokens of sequences, or (queries, keys) of packed ones
EMPTY_OF_CAPTURED = 8  # sequences of a captured batch, one is empty: batches are padded to it
CAPTURED_RANGE = 64  # times as long as the shortest others are the longest
CHOSEN_OF = 4  # times as long as what is read of it is a sequence whose pages are chosen


@dataclass(frozen=True)
class Inputs:
    """The tensors of one call.

    Prefill: q, k, v in the problem's layout. Decode: q is (batch, seqlen_q, num_heads, head_dim),
    k and v are the caches in the problem's kv_layout; `cache_seqlens` is (batch,) int32 and
    `block_table` (batch, max_pages) int32 when paged; a prefill over keys in pages has these too.
    The scales of quantised caches are fp32, of (batch, num_kv_heads), or per token of a cache's
    shape without head_dim. `softcap` 0.0 is off; `alibi_slopes` are fp32 (batch, num_heads), `bias`
    broadcasts to (batch, num_heads, seqlen_q, seqlen_k), or as many keys as a cache can hold,
    `sinks` are (num_heads,), `rng` is int64 (2,), a seed and an offset. Of chosen pages
    `page_positions` (batch, max_pages) int32 tells which of its sequence's pages each entry of the
    table is, -1 none.
    Of packed sequences q is (total_q, num_heads, head_dim), k and v (total_k, num_kv_heads,
    head_dim), and cu_seqlens_q and cu_seqlens_k (batch + 1,) int32 say where each begins.
    `document_ids` are int32 (batch, seqlen_k), or as many keys as a cache can hold, `prefix_lens`
    int32 (batch,).

    Backward: beside those of prefill its `out` and `lse`, fp32 of `lse_shape`, and the gradients
    `dout` and, where lse has one, `dlse`.
    """

    problem: Problem
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cache_seqlens: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    page_positions: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    out: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    dout: torch.Tensor | None = None
    dlse: torch.Tensor | None = None
    block_mask: BlockLists | None = None
    document_ids: torch.Tensor | None = None
    prefix_lens: torch.Tensor | None = None
    dropout_p: float = 0.0
    rng: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.problem.latent:  # wherever k comes from
            object.__setattr__(self, "v", self.k[..., : self.problem.head_dim_v])

    @property
    def modifiers(self) -> Modifiers:
        """As prefill() and decode() take them."""
        p = self.problem
        if p.op == "decode":
            given = Modifiers(p.window, self.softcap, self.alibi_slopes, self.bias, self.sinks)
            return given._replace(
                page_positions=self.page_positions,
                block_mask=self.block_mask,
                document_ids=self.document_ids,
                prefix_lens=self.prefix_lens,
                mask=p.mask or None,
                density=p.density or None,
            )
        given = Modifiers(
            p.window,
            self.softcap,
            self.alibi_slopes,
            self.bias,
            self.sinks,
            block_mask=self.block_mask,
            document_ids=self.document_ids,
            prefix_lens=self.prefix_lens,
            mask=p.mask or None,
            density=p.density or None,
            dropout_p=self.dropout_p,
            rng=self.rng,
        )
        if p.paged:
            given = given._replace(
                cache_seqlens=self.cache_seqlens,
                block_table=self.block_table,
                kv_layout=p.kv_layout,
                max_seqlen_k=p.seqlen_k,
            )
        if not p.varlen:
            return given
        return given._replace(
            cu_seqlens_q=self.cu_seqlens_q,
            cu_seqlens_k=self.cu_seqlens_k,
            max_seqlen_q=p.seqlen_q,
            max_seqlen_k=p.seqlen_k,
        )

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """(batch, num_heads, seqlen_q), or (num_heads, total_q) of packed sequences."""
        p = self.problem
        return (p.num_heads, len(self.q)) if p.varlen else (p.batch, p.num_heads, p.seqlen_q)

    def sequence(self, b: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sequence `b` gathered: q (num_heads, seqlen_q, head_dim), k and v (kv heads, keys, d).

        Of quantised caches k and v are what they stand for, in fp64.
        """
        q = of_sequence(self.problem, self.cu_seqlens_q, b, self.q)
        if self.cache_seqlens is None:
            k, v = (of_sequence(self.problem, self.cu_seqlens_k, b, t) for t in (self.k, self.v))
            return q, k, v
        keys = int(self.cache_seqlens[b])
        k, v = (self._cached(cache, b, keys) for cache in (self.k, self.v))
        if self.k_scale is not None and self.v_scale is not None:
            k, v = (
                dequantised(values, self._scales(scale, b, keys))
                for values, scale in ((k, self.k_scale), (v, self.v_scale))
            )
        return q, k, v

    def _scales(self, scale: torch.Tensor, b: int, keys: int) -> torch.Tensor:
        """The scales of sequence `b`: (kv heads, keys, 1), or (kv heads, 1, 1)."""
        if self.problem.kv_scales == "token":
            return self._cached(scale.unsqueeze(-1), b, keys)
        return scale[b, :, None, None]

    def _cached(self, cache: torch.Tensor, b: int, keys: int) -> torch.Tensor:
        """The first `keys` tokens of sequence `b` in a cache: (kv heads, keys, d)."""
        tokens_first = cache.transpose(1, 2) if self.problem.kv_layout == "hnd" else cache
        if self.block_table is None:
            return tokens_first[b, :keys].transpose(0, 1)
        pages = -(-keys // self.problem.page_size)
        if self.page_positions is None:
            ids = self.block_table[b, :pages].long()
            return tokens_first[ids].flatten(0, 1)[:keys].transpose(0, 1)
        places, ids = self._chosen_pages(b, pages)
        whole = tokens_first.new_zeros(pages, *tokens_first.shape[1:])
        whole[places] = tokens_first[ids]
        return whole.flatten(0, 1)[:keys].transpose(0, 1)

    def _chosen_pages(self, b: int, pages: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Which of the first pages of sequence `b` are read, and where they lie in the cache."""
        assert self.block_table is not None and self.page_positions is not None
        places = self.page_positions[b].long()
        chosen = (places >= 0) & (places < pages)
        return places[chosen], self.block_table[b].long()[chosen]

    def chosen(self, b: int, keys: int) -> torch.Tensor:
        """(keys,) booleans: whether each key of sequence `b` is in a page that is read."""
        size = self.problem.page_size
        read = torch.zeros(-(-keys // size), dtype=torch.bool, device=self.q.device)
        read[self._chosen_pages(b, len(read))[0]] = True
        return read.repeat_interleave(size)[:keys]


def sequence_lengths(problem: Problem, seed: int = 0) -> list[int]:
    """The valid tokens of each sequence: all `seqlen_k`, ragged in [seqlen_k / 8, seqlen_k].

    Of a captured step they are those of one replay, another for each seed.
    The first ragged sequence is the longest, so that a table's width is the same for every seed.
    Where `seqlen_k` keys in chosen pages are read, sequences are CHOSEN_OF times as long.
    """
    if problem.pages == CHOSEN:
        read = sequence_lengths(replace(problem, pages=""), seed)
        return [CHOSEN_OF * keys for keys in read]
    if problem.lengths == "equal":
        return [problem.seqlen_k] * problem.batch
    generator = torch.Generator().manual_seed(seed)
    if problem.lengths == "captured":
        return _captured_lengths(problem, generator)
    low = problem.seqlen_k // 8
    if problem.paged and problem.op == "prefill" and not problem.varlen:
        low = max(low, min(problem.seqlen_q, problem.seqlen_k))  # its queries are among the keys
    drawn = torch.randint(low, problem.seqlen_k + 1, (problem.batch,), generator=generator)
    return [problem.seqlen_k, *drawn.tolist()[1:]]


def _captured_lengths(problem: Problem, generator: torch.Generator) -> list[int]:
    """Of one replay: as many short as long ones, so that seeds differ little in their sum."""
    p, empty = problem, problem.batch // EMPTY_OF_CAPTURED
    used = p.batch - empty
    places = (torch.arange(used) + torch.rand(used, generator=generator)) / used
    lengths = (
        (p.seqlen_k * CAPTURED_RANGE ** (places - 1)).long().clamp_min(min(p.seqlen_q, p.seqlen_k))
    )
    lengths = torch.cat([lengths, lengths.new_zeros(empty)])
    return lengths[torch.randperm(p.batch, generator=generator)].tolist()


def packed_lengths(
    problem: Problem,
    lengths: Lengths | None = None,
    seed: int = 0,
) -> tuple[list[int], list[int]]:
    """The queries and the keys of each packed sequence: those given, or drawn.

    Where the longest have as many of both, each sequence has, as prompts do that begin.
    """
    p = problem
    if lengths is not None:
        pairs = [each if isinstance(each, tuple) else (each, each) for each in lengths]
        return [rows for rows, _ in pairs], [keys for _, keys in pairs]
    keys = sequence_lengths(p, seed)
    if p.seqlen_q == p.seqlen_k:
        return keys, keys
    rows = sequence_lengths(replace(p, seqlen_k=p.seqlen_q), seed + 1)
    return [min(pair) for pair in zip(rows, keys)] if p.paged else rows, keys


def lengths_of(problem: Problem) -> Lengths | None:
    """Those of the problem's own roofline, for inputs that differ in their values alone.

    None where each draws its own: those of a captured step, which stand for many replays.
    """
    if problem.lengths == "captured":
        return None
    if problem.varlen:
        return list(zip(*packed_lengths(problem), strict=True))
    return sequence_lengths(problem) if problem.op == "decode" or problem.paged else None


def make_inputs(
    problem: Problem,
    seed: int = 0,
    device: str | torch.device = "cpu",
    lengths: Lengths | None = None,
    poison: bool = True,
    wide_rows: int = 0,
    scale: float = 1.0,
) -> Inputs:
    """Random normal inputs of the problem, times `scale`; of a backward, what follows from them.

    `lengths` replaces the drawn valid tokens of each sequence in a cache, or the queries and keys
    of each packed one: pairs, or a number for both. `poison` fills dead cache
    slots with NaN and dead block-table entries with 2**30. `wide_rows` makes each of q, k, v a view
    of rows that many elements wider, the rest NaN; an odd number leaves rows unaligned. Of a
    quantised cache it is twice as many bytes; a backward gets a `dlse`, without which other kernels
    run, and wide `out` and `dout`. On device "meta" the tensors have shapes and strides
    only.
    """
    meta = torch.device(device).type == "meta"
    generator = None if meta else torch.Generator(device=device).manual_seed(seed)

    def empty(*shape: int, dtype: str) -> torch.Tensor:
        wider = wide_rows * (2 if dtype in QUANTISED_DTYPES else 1)
        wide = (*shape[:-1], shape[-1] + wider)
        storage = torch.empty(wide, device=device, dtype=KV_TORCH_DTYPES[dtype])
        if wide_rows:
            spoil(storage)
        return storage[..., : shape[-1]]

    def normal(*shape: int) -> torch.Tensor:
        view = empty(*shape, dtype=problem.dtype)
        if meta:
            return view
        if scale == 1.0 and not wide_rows:
            return view.normal_(generator=generator)
        view.copy_(torch.randn(shape, device=device, generator=generator) * scale)
        return view

    def completed(inputs: Inputs) -> Inputs:
        """Of a backward with what its forward leaves and the gradients that come in."""
        if p.op != "backward":
            return inputs
        shape = (*inputs.q.shape[:-1], p.head_dim_v)
        out = empty(*shape, dtype=p.dtype)
        lse = torch.empty(inputs.lse_shape, device=device)
        if not meta:
            own_out, lse = forward(p, inputs.q, inputs.k, inputs.v, inputs.modifiers)
            out.copy_(own_out)
        dout = normal(*shape)
        dlse = torch.randn(lse.shape, device=device, generator=generator) if wide_rows else None
        return replace(inputs, out=out, lse=lse, dout=dout, dlse=dlse)

    p = problem

    def tensor(tokens: int, heads: int, head_dim: int) -> torch.Tensor:
        if p.varlen:
            return normal(tokens, heads, head_dim)
        shape = (p.batch, tokens, heads, head_dim)
        return normal(*(shape[axis] for axis in order))

    order = (0, 1, 2, 3) if p.layout == "bshd" else (0, 2, 1, 3)
    tokens_q, tokens_k = p.seqlen_q, p.seqlen_k
    starts: dict[str, Any] = {}
    packed_keys: list[int] | None = None
    if p.varlen:
        each = packed_lengths(p, lengths, seed)
        tokens_q, tokens_k = map(sum, each)
        lengths = packed_keys = each[1]
        starts = {
            name: torch.tensor([0, *own], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
            for name, own in zip(("cu_seqlens_q", "cu_seqlens_k"), each)
        }
    q = tensor(tokens_q, p.num_heads, p.head_dim)
    if p.op != "decode" and not p.paged:
        k = tensor(tokens_k, p.num_kv_heads, p.head_dim)
        v = tensor(tokens_k, p.num_kv_heads, p.head_dim_v)
        masks = masks_of(p, device, seed, poison, packed_keys, p.seqlen_k)
        on = {**modifiers_for(p, normal, device, seed), **masks}
        return completed(Inputs(p, q, k, v, **on, **starts))
    starts.pop("cu_seqlens_k", None)  # a table tells where keys are
    valid = torch.tensor(lengths if lengths is not None else sequence_lengths(p, seed))
    block_table, places = None, None
    if p.paged:
        longest = p.seqlen_k if p.pages == CHOSEN else max(p.seqlen_k, int(valid.max()))
        width = max(1, -(-longest // p.page_size))
        if meta:
            block_table = torch.empty(p.batch, width, dtype=torch.int32, device=device)
            places = torch.empty_like(block_table)
        else:
            block_table = page_ids(p, width, seed).to(device=device, dtype=torch.int32)
            places = page_places(p, width, valid.tolist(), seed).to(device)
        slots = (p.batch * width, p.page_size)
    else:
        slots = (p.batch, max(1, p.seqlen_k))

    def cache(head_dim: int, largest: float) -> tuple[torch.Tensor, torch.Tensor | None]:
        shape = (*slots, p.num_kv_heads, head_dim)
        if p.kv_layout == "hnd":
            shape = (slots[0], p.num_kv_heads, slots[1], head_dim)
        if not p.quantised:
            return normal(*shape), None
        stored = empty(*shape, dtype=p.kv_dtype)
        return stored, quantised(stored, p, generator, scale, largest * scale)

    # ranges that differ, so that scales that are mixed up show
    k, k_scale = cache(p.head_dim, 4.0)
    v, v_scale = (k, None) if p.latent else cache(p.head_dim_v, 6.0)
    cache_seqlens = valid.to(device=device, dtype=torch.int32)
    if poison:
        per_token = (k_scale, v_scale) if p.kv_scales == "token" else ()
        for tensor_ in (k, v, *per_token):
            assert tensor_ is not None
            cached = tensor_.transpose(1, 2) if p.kv_layout == "hnd" else tensor_
            spoil(cached, dead_slots(cached, cache_seqlens, block_table, places))
        if block_table is not None and places is not None:
            used = -(-cache_seqlens // p.page_size)[:, None]
            block_table = block_table.masked_fill((places >= used) | (places < 0), POISON_PAGE)
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    positions = places if p.pages == CHOSEN else None
    capacity = slots[1] if block_table is None else block_table.shape[1] * p.page_size
    keys = max(1, int(valid.max())) if p.pages == CHOSEN else capacity
    dead = valid.tolist() if poison else ()
    on = {"page_positions": positions, **modifiers_for(p, normal, device, seed, keys, dead)}
    on |= masks_of(p, device, seed, poison, valid.tolist(), keys)
    return Inputs(p, q, k, v, cache_seqlens, block_table, **scales, **on, **starts)
