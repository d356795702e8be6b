"""Probes: the questions by which a clause of docs/contract.md is verified, one function each.

A probe calls its subject on inputs made for the question and gives the reason why the clause is
broken, or "". `make` makes the case's inputs, with the options of `make_inputs`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from autoflash.accuracy import Budget
from autoflash.canary import Canaries
from autoflash.check import picked, sample_rows
from autoflash.inputs import POISON_PAGE, Inputs
from autoflash.problem import Problem
from autoflash.quantised import spoil
from autoflash.subjects import Subject
from autoflash.visibility import seen_keys

Make = Callable[..., Inputs]

CLAUSES = (
    "positions",
    "order",
    "empty rows",
    "lse",
    "dead memory",
    "addresses",
    "strides",
    "numbers",
)
ODD_SCALE = 0.37  # a softmax_scale that no default is
LOUD = 30.0  # times what a key or query usually is
FAR_Q, FAR_K = 448.0, 544.0  # exact in every type; their product passes the largest fp16
ADDRESSES_32 = 2**31
LATE = 4.0  # the last key's scale, where the first one's is near 0


class Probe(NamedTuple):
    clause: str
    ask: Callable[[Subject, Make], str]


def judged(
    subject: Subject, inputs: Inputs, softmax_scale: float | None = None, with_lse: bool = True
) -> str:
    """Why the result is beyond the error budget, or that an input was written to."""
    given = Canaries(inputs.q.device)
    result = subject.run(given.inputs(inputs), softmax_scale, with_lse)
    trespass = given.trespass() or ""
    return trespass or Budget(inputs, softmax_scale).judge(*result).reason


def _counts_visible_keys(subject: Subject, make: Make) -> str:
    # Every visible key weighs the same: lse is the logarithm of how many there are.
    inputs = make()
    if inputs.k_scale is not None:
        return judged(subject, replace(inputs, k_scale=inputs.k_scale * 0))
    return judged(subject, replace(inputs, k=inputs.k * 0))


def _hidden_keys_change_no_bit(subject: Subject, make: Make) -> str:
    inputs = make()
    p, rows = inputs.problem, inputs.q.shape[1 if inputs.problem.layout == "bshd" else 2]
    out, lse = subject.run(inputs)
    for i in sorted({0, rows // 2, rows - 1}):
        row = torch.tensor([i], device=inputs.k.device)
        k, v = (_tokens_first(t, p).clone() for t in (inputs.k, inputs.v))
        for b in range(p.batch):
            asked = (p, inputs.modifiers.masks, b, range(p.num_heads), row)
            hidden = ~seen_keys(*asked, p.seqlen_k, p.seqlen_q).any(dim=0)[0]
            for tensor in (k, v):
                tensor[b, hidden] *= LOUD
        k, v = (_tokens_first(t, p) for t in (k, v))
        other, other_lse = subject.run(replace(inputs, k=k, v=v))
        assert lse is not None and other_lse is not None
        same = _same(_tokens_first(out, p)[:, i], _tokens_first(other, p)[:, i])
        if not same or not _same(lse[..., i], other_lse[..., i]):
            return f"row {i} changes with keys that it does not see"
    return ""


def _keys_before_windows_change_no_bit(subject: Subject, make: Make) -> str:
    # they may be gone from the cache, their pages may be others'
    inputs = make()
    p, lengths = inputs.problem, inputs.cache_seqlens
    assert lengths is not None
    starts = inputs.cu_seqlens_q
    rows = p.seqlen_q if starts is None else starts.diff()
    gone = (lengths - rows - p.window_left).clamp_min(0)
    k, v, table = inputs.k.clone(), inputs.v.clone(), inputs.block_table
    for b, keys in enumerate(gone.tolist()):
        for tokens in (_tokens_first(k, p), _tokens_first(v, p)):
            if table is None:
                spoil(tokens[b, :keys])
            elif keys:
                spoil(tokens[int(table[b, keys // p.page_size]), : keys % p.page_size])
    if table is not None:
        pages = torch.arange(table.shape[1], device=table.device)
        table = table.masked_fill(pages < (gone // p.page_size)[:, None], POISON_PAGE)
    spoilt = replace(inputs, k=k, v=v, block_table=table)
    if not _same(*subject.run(inputs), *subject.run(spoilt)):
        return "results change with keys before all windows"
    return ""


def _scale_comes_first(subject: Subject, make: Make) -> str:
    return judged(subject, make(), softmax_scale=ODD_SCALE)


def _strong_scores(subject: Subject, make: Make) -> str:
    # far beyond a softcap: what comes before and what after it gives another result
    return judged(subject, make(), softmax_scale=1.0)


def _right(subject: Subject, make: Make) -> str:
    return judged(subject, make())


def _lse_is_natural(subject: Subject, make: Make) -> str:
    inputs = make()
    budget = Budget(inputs)
    return budget.judge(budget.out.to(inputs.q.dtype), subject.run(inputs)[1]).reason


def _right_without_lse(subject: Subject, make: Make) -> str:
    return judged(subject, make(), with_lse=False)


def _dead_slots_change_no_bit(subject: Subject, make: Make) -> str:
    poisoned, plain = make(), make(poison=False)
    expected = subject.run(poisoned)
    others = {"live values": plain}
    if not poisoned.problem.quantised:  # whose bytes have no infinity
        k, v = (t.masked_fill(t.isnan(), float("inf")) for t in (poisoned.k, poisoned.v))
        others["inf"] = replace(poisoned, k=k, v=v)
    if poisoned.block_table is not None:
        table = poisoned.block_table
        others["page -1"] = replace(
            poisoned, block_table=table.masked_fill(table == POISON_PAGE, -1)
        )
    for name, inputs in others.items():
        if not _same(*expected, *subject.run(inputs)):
            return f"results change where dead memory holds {name}"
    return ""


def _neighbours_are_not_read(subject: Subject, make: Make) -> str:
    inputs = make()

    def within_longer(tensor: torch.Tensor) -> torch.Tensor:
        tokens = _tokens_first(tensor, inputs.problem)
        longer = torch.nn.functional.pad(tokens, (0, 0, 0, 0, 5, 70), value=float("nan"))
        return _tokens_first(longer[:, 5 : 5 + tokens.shape[1]], inputs.problem)

    q, k, v = map(within_longer, (inputs.q, inputs.k, inputs.v))
    return judged(subject, replace(inputs, q=q, k=k, v=v))


def _sequences_are_apart(subject: Subject, make: Make) -> str:
    # packed ones: what a tile reads past its own must not count
    inputs = make()
    ends_q, ends_k = inputs.cu_seqlens_q, inputs.cu_seqlens_k
    assert ends_q is not None and ends_k is not None
    out, lse = subject.run(inputs)
    last = inputs.problem.batch - 1
    rows, keys = slice(int(ends_q[last]), None), slice(int(ends_k[last]), None)
    spoilt = {name: getattr(inputs, name).clone() for name in ("q", "k", "v")}
    for name, tensor in spoilt.items():
        tensor[rows if name == "q" else keys] = float("nan")
    other, other_lse = subject.run(replace(inputs, **spoilt))
    assert lse is not None and other_lse is not None
    before = slice(0, rows.start)
    if not _same(out[before], lse[:, before], other[before], other_lse[:, before]):
        return "results change with what another sequence holds"
    return ""


def _far_pages(subject: Subject, make: Make) -> str:
    near, cache = _one_cache(make(poison=False))
    table = near.block_table
    assert table is not None
    first = ADDRESSES_32 // cache[0].numel() + 1
    far = cache.new_empty((first + len(cache), *cache.shape[1:]))
    far[first:] = cache
    moved = replace(_attending(near, far), block_table=table + first)
    if not _same(*subject.run(near), *subject.run(moved)):
        return f"results change where the same pages have ids from {first} on"
    return ""


def _far_keys(subject: Subject, make: Make) -> str:
    near, cache = _one_cache(make(poison=False))
    tokens = _tokens_first(cache, near.problem)  # (batch, tokens, kv heads, channels)
    batch, keys, heads, channels = tokens.shape
    apart = max(-(-ADDRESSES_32 // (keys - 1) // 8) * 8, batch * heads * channels)
    memory = cache.new_empty(apart * (keys - 1) + batch * heads * channels)
    steps = (heads * channels, apart, channels, 1)
    far = _tokens_first(memory.as_strided(tokens.shape, steps).copy_(tokens), near.problem)
    return Budget(near).judge(*subject.run(_attending(near, far))).reason


def _one_cache(inputs: Inputs) -> tuple[Inputs, torch.Tensor]:
    """The inputs with k and v in one tensor, and that: one of a size beyond 32 bits is enough."""
    cache = max(inputs.k, inputs.v, key=lambda tensor: tensor.shape[-1])
    return _attending(inputs, cache), cache


def _attending(inputs: Inputs, cache: torch.Tensor) -> Inputs:
    p = inputs.problem
    k = cache[..., : p.head_dim]
    return replace(inputs, k=k, v=k if p.latent else cache[..., : p.head_dim_v])


def _pages_anywhere(subject: Subject, make: Make) -> str:
    inputs = make(poison=False)
    assert inputs.block_table is not None
    pages = len(inputs.k)
    place = torch.arange(pages, device=inputs.k.device).flip(0)
    moved = {"k": inputs.k, "v": inputs.v}
    if inputs.problem.kv_scales == "token":
        assert inputs.k_scale is not None and inputs.v_scale is not None
        moved |= {"k_scale": inputs.k_scale, "v_scale": inputs.v_scale}
    moved = {name: _flipped(tensor) for name, tensor in moved.items()}
    table = place[inputs.block_table.long()].to(torch.int32)
    other = replace(inputs, **moved, block_table=table)
    if not _same(*subject.run(inputs), *subject.run(other)):
        return "results change with the places of pages"
    return ""


def _sampled_rows(subject: Subject, make: Make) -> str:
    inputs = make()
    rows = sample_rows(inputs.problem, 0)
    out, lse = subject.run(inputs)
    result = picked(inputs.problem, out, lse, rows)
    return Budget(inputs, rows=rows).judge(*result).reason


def _wide_rows(subject: Subject, make: Make) -> str:
    return judged(subject, make(wide_rows=8)) or judged(subject, make(wide_rows=3))


def _each_in_another_order(subject: Subject, make: Make) -> str:
    for name in ("q", "k", "v"):
        inputs = make()
        tensor = getattr(inputs, name)
        other = tensor.transpose(1, 2).contiguous().transpose(1, 2)
        if reason := judged(subject, replace(inputs, **{name: other})):
            return f"{name} with its heads and tokens in another order: {reason}"
    return ""


def _each_unaligned(subject: Subject, make: Make) -> str:
    for name in ("q", "k", "v"):
        inputs = make()
        tensor = getattr(inputs, name)
        by = 2 if tensor.element_size() == 1 else 1  # bytes are read in twos
        memory = torch.empty(tensor.numel() + by, dtype=tensor.dtype, device=tensor.device)
        other = memory[by:].view(tensor.shape).copy_(tensor)
        if reason := judged(subject, replace(inputs, **{name: other})):
            return f"{name} beginning {by} elements later: {reason}"
    return ""


def _shared_by_the_batch(subject: Subject, make: Make) -> str:
    inputs = make(poison=False)
    k, v = (t[:1].expand(t.shape) for t in (inputs.k, inputs.v))
    return judged(subject, replace(inputs, k=k, v=v))


def _index_views(subject: Subject, make: Make) -> str:
    inputs = make()
    assert inputs.cache_seqlens is not None
    apart = torch.stack([inputs.cache_seqlens, inputs.cache_seqlens + 1], dim=1)[:, 0]
    other = replace(inputs, cache_seqlens=apart)
    if inputs.block_table is not None:
        wider = torch.nn.functional.pad(inputs.block_table, (2, 3), value=POISON_PAGE)
        other = replace(other, block_table=wider[:, 2:-3].to(wider.dtype))
    if not _same(*subject.run(inputs), *subject.run(other)):
        return "results change where lengths or table are views"
    return ""


def _same_bits_twice(subject: Subject, make: Make) -> str:
    inputs = make()
    if not _same(*subject.run(inputs), *subject.run(inputs)):
        return "two runs differ"
    return ""


def _largest_last(subject: Subject, make: Make) -> str:
    # each tile raises the running maximum
    inputs = make(poison=False)
    keys = inputs.problem.seqlen_k
    growing = torch.linspace(0.1, LATE, keys, device=inputs.k.device).to(inputs.k.dtype)
    k = inputs.k.clone()
    if inputs.block_table is None:
        _tokens_first(k, inputs.problem).mul_(growing[:, None, None])
    else:
        places = _tokens_first(k, inputs.problem)
        size = inputs.problem.page_size
        for ids in inputs.block_table.tolist():
            for column, page in enumerate(ids):
                part = growing[column * size : (column + 1) * size]
                places[page, : len(part)] *= part[:, None, None]
    return judged(subject, replace(inputs, k=k))


def _far_logits(subject: Subject, make: Make) -> str:
    for sign in (-1.0, 1.0):
        inputs = make(poison=False)
        inputs.q[..., 0], inputs.k[..., 0] = FAR_Q, sign * FAR_K
        if reason := judged(subject, inputs):
            return f"logits near {sign * FAR_Q * FAR_K:.3g} before the scale: {reason}"
    return ""


def _heads_are_apart(subject: Subject, make: Make) -> str:
    inputs = make()
    p = inputs.problem
    out, lse = subject.run(inputs)
    assert lse is not None
    for head in {0, p.num_heads - 1}:
        q = inputs.q.clone()
        _heads_first(q, p)[:, head] *= LOUD
        other, other_lse = subject.run(replace(inputs, q=q))
        assert other_lse is not None
        rest = [h for h in range(p.num_heads) if h != head]
        pairs = (_heads_first(out, p), _heads_first(other, p)), (lse, other_lse)
        if not all(_same(a[:, rest], b[:, rest]) for a, b in pairs):
            return f"other heads change with the queries of head {head}"
    return ""


PROBES = {
    "visible keys are counted": Probe("positions", _counts_visible_keys),
    "hidden keys change no bit": Probe("positions", _hidden_keys_change_no_bit),
    "keys before all windows change no bit": Probe("positions", _keys_before_windows_change_no_bit),
    "a scale of its own": Probe("order", _scale_comes_first),
    "scores far beyond a softcap": Probe("order", _strong_scores),
    "rows without keys": Probe("empty rows", _right),
    "lse is the natural logarithm": Probe("lse", _lse_is_natural),
    "out without lse": Probe("lse", _right_without_lse),
    "dead slots change no bit": Probe("dead memory", _dead_slots_change_no_bit),
    "sequences are apart": Probe("dead memory", _sequences_are_apart),
    "neighbours are not read": Probe("dead memory", _neighbours_are_not_read),
    "page ids beyond 32 bits": Probe("addresses", _far_pages),
    "keys beyond 32 bits": Probe("addresses", _far_keys),
    "pages lie anywhere": Probe("addresses", _pages_anywhere),
    "more programs than 65535": Probe("addresses", _sampled_rows),
    "wide rows": Probe("strides", _wide_rows),
    "each tensor in another order": Probe("strides", _each_in_another_order),
    "each tensor unaligned": Probe("strides", _each_unaligned),
    "keys shared by the batch": Probe("strides", _shared_by_the_batch),
    "lengths and table are views": Probe("strides", _index_views),
    "random values": Probe("numbers", _right),
    "some rows at a tuned size": Probe("numbers", _sampled_rows),
    "two runs agree in every bit": Probe("numbers", _same_bits_twice),
    "the largest score comes last": Probe("numbers", _largest_last),
    "scores far from zero": Probe("numbers", _far_logits),
    "heads are apart": Probe("numbers", _heads_are_apart),
}


def _tokens_first(tensor: torch.Tensor, problem: Problem) -> torch.Tensor:
    """A view (batch or pages, tokens, heads, d) of a tensor in the problem's layout, or back.

    Where keys lie in pages the layout is the cache's.
    """
    heads_before = problem.kv_layout == "hnd" or (problem.layout == "bhsd" and not problem.paged)
    return tensor.transpose(1, 2) if heads_before else tensor


def _heads_first(tensor: torch.Tensor, problem: Problem) -> torch.Tensor:
    """A view (batch, num_heads, seqlen_q, d) of q or out."""
    return tensor if problem.layout == "bhsd" else tensor.transpose(1, 2)


def _flipped(tensor: torch.Tensor) -> torch.Tensor:
    """Its pages from the last to the first."""
    if tensor.element_size() == 1:  # torch flips no fp8
        return tensor.view(torch.uint8).flip(0).view(tensor.dtype)
    return tensor.flip(0)


def _same(*tensors: torch.Tensor | None) -> bool:
    """Whether the second half of the tensors has the bits of the first."""
    half = len(tensors) // 2
    return all(
        a is b or (a is not None and b is not None and torch.equal(_bytes(a), _bytes(b)))
        for a, b in zip(tensors[:half], tensors[half:], strict=True)
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
