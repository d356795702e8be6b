"""append_kv(): new tokens written to the caches that decode() reads."""

from __future__ import annotations

import torch
from torch.compiler import is_dynamo_compiling

from .append import append_cache, append_scale, append_switches
from .argument_types import refuse_types
from .cache_layout import identified_layout
from .installed import device_for, installed
from .operators import append_kv_traced
from .recall import recalled
from .recipe import form_of
from .scales import Scale, scale_number
from .served import launch_again, launch_first, remember_served, served_before


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
    values = (k, v, k_cache, v_cache, slot_mapping, kv_layout, k_scale, v_scale)
    if not is_dynamo_compiling():
        if recalled["append_kv"].launch(values) is not NotImplemented:
            return
        refuse_types("append_kv", values)
    if torch.compiler.is_compiling():
        tensors = (k, v, k_cache, v_cache, slot_mapping)
        append_kv_traced(tensors, (k_scale, v_scale), kv_layout)
        return
    kv_layout = identified_layout("append_kv", kv_layout, k_cache, None)
    numbers = (scale_number(k_scale), scale_number(v_scale))
    key = ("append_kv", kv_layout, *numbers, k_scale is None, v_scale is None)
    given = (k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    form = (key, *map(form_of, given))
    served = served_before(form)
    module = None
    if served is None:
        switches = append_switches(*given[:5], kv_layout, k_scale, v_scale)
        device_for(k)
        module = installed().module("append_kv", switches)
    if not len(k):
        return
    scales = [append_scale(each, k.shape[1]) for each in (k_scale, v_scale) if each is not None]
    tensors = (k, v, append_cache(k_cache), append_cache(v_cache), *scales, slot_mapping)
    if served is not None:
        launch_again(served, tensors)
        names = ("k", "v", "k_cache", "v_cache", *("k_scale", "v_scale")[: len(scales)])
        recall = (append_kv, values, (*names, "slot_mapping"), None)
        remember_served(form, served, tensors, *recall)
    elif module is not None:
        launch_first(form, None, tensors, lambda _: module.plan(*tensors, kv_layout))
