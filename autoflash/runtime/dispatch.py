"""The exported functions: prefill() and decode(), served by the config chosen, and append_kv()."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from .append import append_cache, append_scale, append_switches
from .arguments import (
    check_cache_entries,
    check_output,
    decode_problem,
    prefill_problem,
    refuse_arguments,
    scale_or_default,
)
from .capture import refuse_unloaded
from .device import Device, device_of
from .launch import Launch, run_plan
from .modifiers import Modifiers, modifiers_of, prefill_plan
from .problem import Problem
from .recipe import NewWorkspace, Recipe, form_of, learn_recipe
from .scales import Scale, cache_form, scale_form
from .selection import Choice, Selector, Tables

MOST_FORMS = 1024  # of calls whose recipes are kept


class Served(NamedTuple):
    """What served a call, and serves calls of the same form."""

    problem: Problem
    choice: Choice
    recipe: Recipe


_selectors: list[Selector] = []
_served: dict[tuple[Any, ...], Served] = {}
_appended: dict[tuple[Any, ...], Recipe] = {}


def install_tables(tables: Tables) -> None:
    """Give prefill() and decode() the tables they choose from."""
    _selectors[:] = [Selector(tables)]
    _served.clear()
    _appended.clear()


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
    `lse` is fp32 (batch, num_heads, seqlen_q), the natural logarithm of the sum of exponentials;
    rows that see no key have `out` 0 and `lse` -inf, or the sink. Never waits for the device.
    Raises ProblemError naming an argument that does not fit or is not served yet.
    """
    refuse_arguments(
        "prefill",
        block_mask=block_mask,
        document_ids=document_ids,
        prefix_lens=prefix_lens,
        mask=mask,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        cache_seqlens=cache_seqlens,
        block_table=block_table,
        kv_layout=kv_layout != "nhd",  # names the order of a cache's axes
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        dropout_p=dropout_p,
        rng=rng,
        deterministic=deterministic,
        batch_invariant=batch_invariant,
    )
    modifiers = Modifiers(window, softcap, alibi_slopes, bias, sinks)
    given = (q, k, v, out, softmax_scale, *window, *modifiers[1:])
    form = ("prefill", *map(form_of, given), causal, layout, return_lse)
    served = _served.get(form)
    if served is not None:
        out, lse = _outputs(q, served.problem, out, return_lse)
        plan = _planned_again(served, (q, k, v, out, lse, *modifiers.tensors))
    else:
        problem = prefill_problem(q, k, v, causal, layout, modifiers)
        if out is not None:
            check_output("prefill", out, q, problem.head_dim_v)
        scale = scale_or_default("prefill", softmax_scale, problem.head_dim)
        choice, device = _choose(problem, q)
        out, lse = _outputs(q, problem, out, return_lse)
        modifiers = modifiers_of(problem, modifiers)
        first = (q, k, v, out, lse, scale, layout, device.num_sms, choice.knobs)
        make_plan = partial(prefill_plan, choice.module, problem, modifiers, *first)
        tensors = (q, k, v, out, lse, *modifiers.tensors)
        plan = _planned(form, problem, choice, tensors, make_plan)
    _launch(plan, q)
    return (out, lse) if lse is not None else out


def decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
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
    document_ids: torch.Tensor | None = None,
    prefix_lens: torch.Tensor | None = None,
    mask: str | None = None,
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
    kv_layout "hnd". They are of q's type, or float8_e4m3fn or int8 with a `k_scale` and a `v_scale`
    that say what a stored 1 counts: a number, or fp32 of one element, of (num_kv_heads,) or
    (batch, num_kv_heads), or one for each head of each token, of the cache's shape without
    head_dim. `cache_seqlens` counts the valid tokens, the queries' own included; slots and
    table entries past them may hold anything. `max_seqlen_k` (no length is greater), `lengths`
    (equal, ragged) and `pages` (permuted, contiguous, shared by all sequences at the beginning)
    only help the choice. `lse` is fp32 (batch, num_heads, seqlen_q), (batch, num_heads) if q has no
    query axis. `check` looks at lengths and page ids, and waits for the device. Raises
    ProblemError naming an argument that does not fit or is not served yet.
    """
    refuse_arguments(
        "decode",
        window=window,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        bias=bias,
        sinks=sinks,
        document_ids=document_ids,
        prefix_lens=prefix_lens,
        mask=mask,
        page_positions=page_positions,
        batch_invariant=batch_invariant,
    )
    hints = (max_seqlen_k, lengths, pages)
    given = (q, k_cache, v_cache, cache_seqlens, block_table, k_scale, v_scale, out, softmax_scale)
    form = ("decode", *map(form_of, given), kv_layout, *hints, return_lse)
    served = _served.get(form)
    # a plan is made of 4-D tensors; its recipe does with 3-D ones, which lie in memory alike
    add_query_axis, own_out = served is None and q.dim() == 3, out
    if add_query_axis:
        q, out = q.unsqueeze(1), None if out is None else out.unsqueeze(1)
    if served is not None:
        problem = served.problem
    else:
        problem = decode_problem(
            q, k_cache, v_cache, cache_seqlens, block_table, kv_layout, *hints, k_scale, v_scale
        )
        if out is not None:
            check_output("decode", out, q, problem.head_dim_v)
    if check:
        check_cache_entries(problem, k_cache, cache_seqlens, block_table)
    scales = [
        scale_form(each, problem.kv_scales, problem.batch, problem.num_kv_heads)
        for each in (k_scale, v_scale)
        if each is not None
    ]
    out, lse = _outputs(q, problem, out, return_lse)
    caches = (cache_form(k_cache), cache_form(v_cache))
    tensors = (q, *caches, *scales, cache_seqlens, block_table, out, lse)
    if served is not None:
        plan = _planned_again(served, tensors)
    else:
        scale = scale_or_default("decode", softmax_scale, problem.head_dim)
        choice, device = _choose(problem, q)
        sizes = (problem.seqlen_k, device.num_sms)
        first = (*tensors, scale, kv_layout, *sizes, choice.knobs)
        plan = _planned(form, problem, choice, tensors, partial(choice.module.plan, *first))
    _launch(plan, q)
    if add_query_axis:
        out = out.squeeze(1) if own_out is None else own_out
        lse = None if lse is None else lse.squeeze(2)
    return (out, lse) if lse is not None else out


def append_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    kv_layout: str = "nhd",
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
) -> None:
    """Write new tokens to the caches that decode() reads, each to the slot given for it.

    k and v are (tokens, num_kv_heads, head_dim), the caches as decode() takes them and of the
    tokens' type or quantised. `slot_mapping`, int32 or int64 (tokens,), holds
    page * page_size + place in the page (of a cache without pages, sequence * tokens + place); a
    token whose slot is negative, or past the cache, is skipped. The scales of a quantised cache are
    numbers, fp32 of one element or (num_kv_heads,), or for each head of each token of the cache's
    shape without head_dim: these are written here, the largest of a head becoming the largest that
    a byte holds. Values too large for the others are cut off. Raises ProblemError naming an
    argument that does not fit.
    """
    given = (k, v, k_cache, v_cache, slot_mapping)
    form = (*map(form_of, (*given, k_scale, v_scale)), kv_layout)
    recipe, module = _appended.get(form), None
    if recipe is None:
        switches = append_switches(*given, kv_layout, k_scale, v_scale)
        device_of(k, _selector().tables.gpus[0].device)
        module = _selector().module("append_kv", switches)
    if not len(k):
        return
    scales = [append_scale(each, k.shape[1]) for each in (k_scale, v_scale) if each is not None]
    tensors = (k, v, append_cache(k_cache), append_cache(v_cache), *scales, slot_mapping)
    if recipe is not None:
        plan = recipe.plan(tensors, _workspaces(k))
    else:
        plan, recipe = learn_recipe(
            lambda _: module.plan(*tensors, kv_layout), tensors, _workspaces(k)
        )
        if recipe is not None:
            _remember(_appended, form, recipe)
    _launch(plan, k)


def explain(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> dict[str, Any]:
    """What serves this call and why, found by making it: `explain(prefill, q, k, v, causal=True)`.

    Gives the problem, family, knobs, `how` (exact, bucket, nearest, default), the distance to the
    tuned sizes in doublings, and the regret measured for the tuned problem.
    """
    function(*arguments, **keywords)
    problem, choice = _last_choice[0]
    return {"problem": problem, **choice._asdict(), "module": choice.module.__name__}


def coverage() -> dict[str, int]:
    """How many calls were served how since the module was imported."""
    return dict(_selector().counts)


_last_choice: list[tuple[Problem, Choice]] = []


def _selector() -> Selector:
    if not _selectors:
        raise RuntimeError(
            "no tables are installed: this is the source, export a module to call it"
        )
    return _selectors[0]


def _choose(problem: Problem, q: torch.Tensor) -> tuple[Choice, Device]:
    selector = _selector()
    device = device_of(q, selector.tables.gpus[0].device)
    choice = selector.choose(problem, device)
    _last_choice[:] = [(problem, choice)]
    return choice, device


def _outputs(
    q: torch.Tensor, problem: Problem, out: torch.Tensor | None, return_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if out is None:
        out = q.new_empty((*q.shape[:-1], problem.head_dim_v))
    if not return_lse:
        return out, None
    shape = (problem.batch, problem.num_heads, problem.seqlen_q)[: q.dim() - 1]
    return out, torch.empty(shape, dtype=torch.float32, device=q.device)


def _planned(
    form: tuple[Any, ...],
    problem: Problem,
    choice: Choice,
    tensors: Sequence[Any],
    make_plan: Callable[[NewWorkspace], list[Launch]],
) -> list[Launch]:
    """The plan of a call of a form not seen before, which is then served by its recipe."""
    plan, recipe = learn_recipe(make_plan, tensors, _workspaces(tensors[0]))
    if recipe is not None:
        _remember(_served, form, Served(problem, choice, recipe))
    return plan


def _remember(known: dict[tuple[Any, ...], Any], form: tuple[Any, ...], learnt: Any) -> None:
    if len(known) == MOST_FORMS:
        known.clear()
    known[form] = learnt


def _planned_again(served: Served, tensors: Sequence[Any]) -> list[Launch]:
    """The plan of a call whose form was seen before."""
    _selector().counts[served.choice.how] += 1
    _last_choice[:] = [(served.problem, served.choice)]
    return served.recipe.plan(tensors, _workspaces(tensors[0]))


def _launch(plan: list[Launch], q: torch.Tensor) -> None:
    """Run the plan on the tensors' own device, current or not."""
    if not q.is_cuda:
        run_plan(plan)
        return
    if q.device.index == torch.cuda.current_device():
        refuse_unloaded(plan)
        run_plan(plan)
        return
    with torch.cuda.device(q.device):
        refuse_unloaded(plan)
        run_plan(plan)


def _workspaces(q: torch.Tensor) -> Callable[[tuple[int, ...], torch.dtype], torch.Tensor]:
    """A maker of scratch tensors; the caching allocator orders their reuse by stream."""
    return lambda shape, dtype: torch.empty(shape, dtype=dtype, device=q.device)
