"""The exported functions prefill() and decode(), by the config chosen, and self_test()."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from .appending import append_kv
from .argument_types import refuse_types
from .arguments import (
    check_cache_entries,
    check_output,
    decode_problem,
    keys_held,
    prefill_problem,
    refuse_arguments,
    scale_or_default,
)
from .cache_layout import identified_layout
from .dropping import drawn_rng
from .installed import tally_for
from .launch import interpreted
from .masked import prefill_masked, with_masks
from .masks import Masks, any_given, block_lists, check_lists
from .modifiers import NO_MODIFIERS, Modifiers, decode_plan, modifiers_of, prefill_plan
from .no_queries import attended_by_none
from .operators import decode_traced, prefill_traced
from .recall import recalled
from .recipe import form_of
from .scales import Scale, cache_form, scale_form, scale_number
from .selection import INVARIANT_SMS
from .self_test import SelfTestCase, run_self_test
from .served import launch_again, launch_first, outputs_of, remember_served, served_before
from .training import asks_gradients, prefill_with_gradients
from .varlen import prefill_packed

# not served yet, the first two without a block_table
PREFILL_OTHERS = ("cache_seqlens", "kv_layout", "q_scale", "k_scale", "v_scale")
RECALLED_PREFILL = ("q", "k", "v", "out", "lse", "alibi_slopes", "bias", "sinks", "rng")
RECALLED_DECODE = (
    *("cache_seqlens", "block_table", "out", "lse"),
    *("alibi_slopes", "bias", "sinks", "page_positions"),
    *("document_ids", "prefix_lens"),  # if either is given; no call with blocks is recalled
)


def prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    block_mask: Any = None,
    document_ids: torch.Tensor | None = None,
    prefix_lens: torch.Tensor | None = None,
    mask: str | None = None,
    density: int | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    cache_seqlens: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    kv_layout: str = "nhd",
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    layout: str = "bshd",
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    dropout_p: float = 0.0,
    rng: torch.Tensor | None = None,
    deterministic: bool = False,
    batch_invariant: bool = False,
    check: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of every query over the keys it sees: `out`, or `(out, lse)` with `return_lse`.

    q is (batch, seqlen_q, num_heads, head_dim), k and v (batch, seqlen_k, num_kv_heads, head_dim),
    heads before tokens with layout "bhsd". Causal is bottom-right aligned: query i sees keys up to
    i + seqlen_k - seqlen_q, its position. `window` is how many keys before and after its position a
    query sees at most, -1 for all. `softcap` bounds scaled scores s to softcap * tanh(s / softcap),
    0 is off; then `alibi_slopes`, fp32 (num_heads,) or (batch, num_heads), take slope * distance
    off, or `bias`, of q's type and broadcast to (batch, num_heads, seqlen_q, seqlen_k), is added.
    `sinks` (num_heads,) are logits of a key that every query of a head sees and whose v is 0.
    `block_mask` is a BlockMask of torch's FlexAttention: absent blocks are not visited, full ones
    not masked, the others by causal and by `mask`, an expression of b, h, q_idx and kv_idx that
    holds where a key is seen, which may be given alone too. `document_ids`, int32 (batch,
    seqlen_k), hide keys of other documents than the one at the query's position, `prefix_lens`,
    int32 (batch,), uncover first keys that causal hides. `density`, in percent, of blocks that
    there are, of keys in a document or the prefix, only helps the choice; 10 is assumed.
    `lse` is fp32 (batch, num_heads, seqlen_q), the natural logarithm of the sum of exponentials;
    rows that see no key have `out` 0 and `lse` -inf, or the sink.
    Sequences of any lengths may be packed one after the other: q is (total_q, num_heads, head_dim),
    k and v (total_k, num_kv_heads, head_dim), `lse` (num_heads, total_q). `cu_seqlens_q` and
    `cu_seqlens_k`, int32 or int64 (batch + 1,), say where each begins; none has more queries than
    `max_seqlen_q`, nor more keys than `max_seqlen_k`, and a `bias` has so many of both, ids are
    (batch, max_seqlen_k). Rows past the last one are not written. Rules, ids and prefixes count
    queries and keys in each sequence.
    With a `block_table` the keys are those of a cache, of which q, packed too, are the last: k, v,
    `block_table`, `cache_seqlens`, `kv_layout`, and a `bias`, ids or rule, packed queries counted
    in their own sequence, are as in decode(), any number of queries may come at once, and
    `max_seqlen_k`, which no length may pass, only helps the choice.
    Never waits for the device, but to look at these with `check`.
    Where the module carries a backward, `out` and `lse` are differentiable once with respect to q,
    k, v, `bias` and `sinks`. With `deterministic` the same call has the same gradients to the bit;
    of `out` and `lse` that is so in any case. `batch_invariant` gives a sequence the bits that it
    has alone, in whatever batch.
    With a `dropout_p`, taken to the nearest 65536th, that share of the softmax's numbers becomes 0
    and the rest is divided by 1 - dropout_p; `lse` is as without. `rng`, int64 (2,) on the device,
    is a seed and an offset: the same two drop the same numbers, whatever serves the call. Without
    it they are drawn from torch's generator of the device.
    Raises ProblemError naming an argument that does not fit or is not served yet.
    """
    if dropout_p and rng is None:
        rng = drawn_rng(q)
    values = (
        *(q, k, v, causal, window, softmax_scale, softcap, alibi_slopes, bias, sinks),
        *(block_mask, document_ids, prefix_lens, mask, density),
        *(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, cache_seqlens, block_table),
        *(kv_layout, q_scale, k_scale, v_scale, layout, out, return_lse, dropout_p, rng),
        *(deterministic, batch_invariant, check),
    )
    if not is_dynamo_compiling():
        result = recalled["prefill"].launch(values)
        if result is not NotImplemented:
            return result
        refuse_types("prefill", values)
        if not q.numel() and q.dim() == 4:
            return attended_by_none("prefill", q, {"k": k, "v": v}, layout, out, return_lse)
    paged = block_table is not None
    others = (
        None if paged else cache_seqlens,
        kv_layout if kv_layout != "nhd" and not paged else None,  # of the order of a cache's axes
        *(q_scale, k_scale, v_scale),
    )
    refuse_arguments("prefill", PREFILL_OTHERS, others)
    packed = paged or cu_seqlens_q is not None or cu_seqlens_k is not None or layout == "thd"
    packing = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    masks = (block_mask, document_ids, prefix_lens, mask, density)
    masked = any_given(masks)
    if masked and (cu_seqlens_q is not None or cu_seqlens_k is not None or layout == "thd"):
        refuse_arguments("prefill: packed", Masks._fields[:1], masks[:1])
    if torch.compiler.is_compiling():
        refuse_arguments("prefill: in a graph", ("batch_invariant",), (batch_invariant or None,))
        tensors, numbers = (alibi_slopes, bias, sinks), (softmax_scale, softcap)
        read = (q, k, v, causal, window, *numbers, tensors, layout, packing, masks)
        pages = (cache_seqlens, block_table, kv_layout)
        dropout = (dropout_p, rng if dropout_p else None)
        return prefill_traced(*read, pages, dropout, check, deterministic, out, return_lse)
    modifiers = Modifiers(window, softcap, alibi_slopes, bias, sinks, *packing)
    if dropout_p:
        # what is dropped of a sequence depends on its place in the batch
        refuse_arguments("prefill: with dropout", ("batch_invariant",), (batch_invariant or None,))
        modifiers = modifiers._replace(dropout_p=dropout_p, rng=rng)
    options = (causal, layout, softmax_scale, out, return_lse, check)
    asks = asks_gradients(q, k, v, alibi_slopes, bias, sinks)
    if masked:
        refuse_arguments("prefill: with masks", ("batch_invariant",), (batch_invariant or None,))
        modifiers = with_masks(modifiers, *masks)
        if not (packed or asks):
            return prefill_masked(q, k, v, modifiers, *options)
    packed = packed or max_seqlen_q is not None or max_seqlen_k is not None
    if packed and not asks:
        if paged:
            kv_layout = identified_layout("prefill", kv_layout, k, True)
            pages = {"cache_seqlens": cache_seqlens, "block_table": block_table}
            modifiers = modifiers._replace(**pages, kv_layout=kv_layout)
        options += (batch_invariant, (prefill, values))
        return prefill_packed(q, k, v, modifiers, *options)
    given = (q, k, v, out, alibi_slopes, bias, sinks, modifiers.rng)
    key = (
        *("prefill", causal, layout, return_lse, softmax_scale, softcap, *window, batch_invariant),
        *(out is None, alibi_slopes is None, bias is None, sinks is None, dropout_p),
    )
    if asks:
        refuse_arguments("prefill: with gradients", ("out", "block_table"), (out, block_table))
        call = {**modifiers.of_prefill, "causal": causal, "softmax_scale": softmax_scale}
        call["batch_invariant"] = batch_invariant
        attention = partial(prefill, **call, layout=layout, return_lse=True, check=check)
        options = (causal, layout, modifiers, softmax_scale, deterministic)
        both = prefill_with_gradients(attention, q, k, v, *options)
        return both if return_lse else both[0]
    form = (key, *map(form_of, given))
    served = served_before(form)
    if served is None:
        problem = prefill_problem(q, k, v, causal, layout, modifiers)
        if out is not None:
            check_output("prefill", out, q, problem.head_dim_v)
        scale = scale_or_default("prefill", softmax_scale, problem.head_dim)
        tally, device = tally_for(problem, q, batch_invariant)
        out, lse = outputs_of(q, problem, out, return_lse)
        modifiers = modifiers_of(problem, modifiers)
        first = (q, k, v, out, lse, scale, layout, device.num_sms, tally.choice.knobs)
        make_plan = partial(prefill_plan, tally.choice.module, problem, modifiers, *first)
        launch_first(form, tally, (q, k, v, out, lse, *modifiers.tensors), make_plan)
    else:
        out, lse = outputs_of(q, served.tally.problem, out, return_lse)
        tensors = (q, k, v, out, lse, *modifiers.tensors)
        launch_again(served, tensors)
        recall = (prefill, values, RECALLED_PREFILL, (out, lse))
        remember_served(form, served, tensors, *recall)
    return (out, lse) if lse is not None else out


def decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    cache_seqlens: torch.Tensor,
    *,
    block_table: torch.Tensor | None = None,
    kv_layout: str = "nhd",
    max_seqlen_k: int | None = None,
    lengths: str = "ragged",
    pages: str = "permuted",
    window: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    block_mask: Any = None,
    document_ids: torch.Tensor | None = None,
    prefix_lens: torch.Tensor | None = None,
    mask: str | None = None,
    density: int | None = None,
    page_positions: torch.Tensor | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    check: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of each sequence's last query tokens over its cache: `out`, or `(out, lse)`.

    q is (batch, seqlen_q, num_heads, head_dim), of 1 to 16 query tokens that are causal among
    themselves, or (batch, num_heads, head_dim), and `out` has its shape.
    The caches are (batch, tokens, num_kv_heads, head_dim), or with a `block_table`, int32 or int64
    (batch, max_pages), (pages, page_size, num_kv_heads, head_dim); heads come before tokens with
    kv_layout "hnd", which may be what kv_identity() gave for the cache. They are of q's type, or
    float8_e4m3fn or int8 with a `k_scale` and a `v_scale` that say what a stored 1 counts: a
    number, or fp32 of one element, of (num_kv_heads,) or (batch, num_kv_heads), or one for each
    head of each token, of the cache's shape without head_dim. `cache_seqlens` counts the valid
    tokens, the queries' own included; slots and table entries past them may hold anything.
    `window`, `softcap`, `alibi_slopes`, `bias`, `sinks`, `mask`, `document_ids`, `prefix_lens` and
    `density` are as in prefill(), q_idx of a rule counting the step's query tokens, kv_idx all keys
    of a sequence; keys before the windows of all its queries are not read, nor those of documents
    whose ids lie apart from theirs. A `block_mask` has one row of blocks, of the step's queries,
    and lists blocks of a sequence's keys by their place in it, in whatever pages they lie, those
    past a length in vain; a block that no query head of a KV head lists is not read. A bias
    broadcasts to (batch, num_heads, seqlen_q, keys), and ids are (batch, keys), of as many keys as
    the cache, or the table's pages, can hold, anything past a length; with `page_positions` of as
    many as the longest sequence has, or more.
    With `page_positions`, whole numbers as the `block_table`, some pages of each sequence are read:
    each entry tells which page of its sequence, counted from 0, stands there in the table, a
    negative one that none does; no page may stand there twice. Of latent attention k_cache has one
    head of 576 channels, whose first 512 are the values too: v_cache is None, and `out` 512 wide.
    `max_seqlen_k` (no length is greater), `lengths` (equal, ragged, captured: of a graph's replays)
    and `pages` (permuted, contiguous, shared by all sequences at the beginning) only help the
    choice. `lse` is fp32
    (batch, num_heads, seqlen_q), (batch, num_heads) if q has no query axis. `batch_invariant` gives
    a sequence the bits that it has alone, in whatever batch: its cache is not split, which takes
    longer where the batch is small and the cache long. `check` looks at lengths and page ids, and
    waits for the device. Raises ProblemError naming an argument that does not fit.
    """
    values = (
        *(q, k_cache, v_cache, cache_seqlens, block_table, kv_layout, max_seqlen_k, lengths, pages),
        *(window, softmax_scale, softcap, alibi_slopes, bias, sinks, block_mask, document_ids),
        *(prefix_lens, mask, density, page_positions, k_scale, v_scale, out, return_lse),
        *(batch_invariant, check),
    )
    if not is_dynamo_compiling():
        result = recalled["decode"].launch(values)
        if result is not NotImplemented:
            return result
        refuse_types("decode", values)
        if not q.numel():
            caches = {"k_cache": k_cache, "v_cache": v_cache}
            return attended_by_none("decode", q, caches, "bshd", out, return_lse)
    hints = (max_seqlen_k, lengths, pages)
    if torch.compiler.is_compiling():
        refuse_arguments("decode: in a graph", ("batch_invariant",), (batch_invariant or None,))
        read = (q, k_cache, v_cache, cache_seqlens, block_table, (k_scale, v_scale), kv_layout)
        modified = (alibi_slopes, bias, sinks, page_positions, *window, softcap)
        masks = (block_mask, document_ids, prefix_lens, mask, density)
        return decode_traced(*read, hints, modified, masks, softmax_scale, check, out, return_lse)
    kv_layout = identified_layout("decode", kv_layout, k_cache, block_table is not None)
    on = (alibi_slopes, bias, sinks, page_positions)
    lists = None if block_mask is None else block_lists(block_mask, "decode")
    masks = () if document_ids is None and prefix_lens is None else (document_ids, prefix_lens)
    masks += () if lists is None else lists.tensors
    given = (q, k_cache, v_cache, cache_seqlens, block_table, k_scale, v_scale, out, *on, *masks)
    key = (
        *("decode", kv_layout, *hints, return_lse, softmax_scale, softcap, *window, mask, density),
        batch_invariant,
        *(scale_number(k_scale), scale_number(v_scale)),
        *(v_cache is None, block_table is None, k_scale is None, v_scale is None, out is None),
        *(alibi_slopes is None, bias is None, sinks is None, page_positions is None),
        None if lists is None else (lists.BLOCK_SIZE, lists.rule),
    )
    form = (key, *map(form_of, given))
    served = served_before(form)
    # a plan is made of 4-D tensors; its recipe does with 3-D ones, which lie in memory alike
    add_query_axis, own_out = served is None and q.dim() == 3, out
    if add_query_axis:
        q, out = q.unsqueeze(1), None if out is None else out.unsqueeze(1)
    modifiers = NO_MODIFIERS  # which only a plan asks for
    if served is not None:
        problem = served.tally.problem
    else:
        modifiers = Modifiers(window, softcap, *on[:3], page_positions=page_positions, mask=mask)
        modifiers = modifiers._replace(
            block_mask=lists, document_ids=document_ids, prefix_lens=prefix_lens, density=density
        )
        read = (q, k_cache, v_cache, cache_seqlens, block_table)
        problem = decode_problem(*read, kv_layout, *hints, k_scale, v_scale, modifiers)
        if out is not None:
            check_output("decode", out, q, problem.head_dim_v)
    if check:
        of_keys = (page_positions, bias, document_ids)
        check_cache_entries(problem, k_cache, cache_seqlens, block_table, *of_keys)
        if lists is not None:
            check_lists(problem, lists, keys_held(k_cache, block_table, kv_layout))
    scales = [
        scale_form(each, problem.kv_scales, problem.batch, problem.num_kv_heads)
        for each in (k_scale, v_scale)
        if each is not None
    ]
    out, lse = outputs_of(q, problem, out, return_lse)
    caches = (cache_form(k_cache), None if v_cache is None else cache_form(v_cache))
    tensors = (q, *caches, *scales, cache_seqlens, block_table, out, lse)
    if served is not None:
        tensors += (*on, *masks)
        launch_again(served, tensors)
        if not check and lists is None:
            names = ("q", "k_cache", "v_cache", *("k_scale", "v_scale")[: len(scales)])
            recall = (decode, values, (*names, *RECALLED_DECODE), (out, lse))
            remember_served(form, served, tensors, *recall)
    else:
        scale = scale_or_default("decode", softmax_scale, problem.head_dim)
        tally, device = tally_for(problem, q, batch_invariant)
        modifiers = modifiers_of(problem, modifiers)
        num_sms = INVARIANT_SMS if batch_invariant else device.num_sms
        rest = (scale, kv_layout, problem.seqlen_k, num_sms, tally.choice.knobs)
        first = (tally.choice.module, problem, modifiers)
        make_plan = partial(decode_plan, *first, *tensors, *rest)
        on = (modifiers.alibi_slopes, modifiers.bias, sinks, page_positions)
        if modifiers.block_mask is not None:
            masks = modifiers.block_mask.tensors
        launch_first(form, tally, (*tensors, *on, *masks), make_plan)
    if add_query_axis:
        out = out.squeeze(1) if own_out is None else own_out
        lse = None if lse is None else lse.squeeze(2)
    return (out, lse) if lse is not None else out


def self_test(device: torch.device | str | None = None) -> list[SelfTestCase]:
    """Whether this module is right on this machine: small cases of every function, judged.

    `device` is the current GPU, or in triton's interpreter the CPU, unless given. Gives each case's
    error and what it may be; raises SelfTestError naming the cases that are wrong.
    """
    if device is None:
        device = "cpu" if interpreted() else torch.device("cuda", torch.cuda.current_device())
    with torch.no_grad():
        return run_self_test(prefill, decode, append_kv, device)
