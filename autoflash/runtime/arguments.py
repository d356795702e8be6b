"""Arguments of prefill() and decode(): checked, and turned into a Problem."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from .mask_rule import INT32_LIMIT
from .masks import any_given, mask_fields
from .modifiers import NO_MODIFIERS, Modifiers, modifier_fields
from .packed import packed_fields, packed_layout
from .problem import (
    CHOSEN,
    KV_LAYOUTS,
    LATENT_WIDTHS,
    LAYOUTS,
    Problem,
    ProblemError,
    reached_window,
)
from .scales import QUANTISED_ARGUMENTS, Scale, scales_granularity

ARGUMENT_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
AXES = {  # of K and V, by layout
    "bshd": ("batch", "seqlen_k", "num_kv_heads", "head_dim"),
    "bhsd": ("batch", "num_kv_heads", "seqlen_k", "head_dim"),
    "thd": ("seqlen_k", "num_kv_heads", "head_dim"),
}
INDEX_DTYPES = (torch.int32, torch.int64)
INSTEAD = {  # what serves in place of what is not supported
    "prefill: packed: block_mask": "mask hides keys",
}


def refuse_arguments(function: str, names: tuple[str, ...], given: tuple[Any, ...]) -> None:
    """Raise ProblemError naming the first argument that is set although it is not served yet.

    What is not set is given as None.
    """
    if not any_given(given):  # every call passes here
        return
    for name, value in zip(names, given, strict=True):
        if value is not None:
            call = f"{function}: {name}"
            instead = f": {INSTEAD[call]}" if call in INSTEAD else ""
            raise ProblemError(f"{call} is not supported yet{instead}")


def prefill_problem(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    layout: str,
    modifiers: Modifiers = NO_MODIFIERS,
) -> Problem:
    """The problem these tensors pose. Raises ProblemError naming the argument that does not fit."""
    if layout not in LAYOUTS:
        raise ProblemError(f"prefill: layout {layout!r} is none of {', '.join(LAYOUTS)}")
    layout = packed_layout(layout, modifiers)
    axes = AXES[layout]
    check_tensors("prefill", q, len(axes), k=k, v=v)
    heads, tokens = axes.index("num_kv_heads"), axes.index("seqlen_k")
    for axis, name in enumerate(axes):
        if name in ("batch", "head_dim"):
            _expect("prefill", "k", name, k.shape[axis], q.shape[axis])
        if name != "head_dim":
            _expect("prefill", "v", name, v.shape[axis], k.shape[axis])
    sizes = {"batch": q.shape[0], "seqlen_q": q.shape[tokens], "seqlen_k": k.shape[tokens]}
    if layout == "thd":
        sizes = packed_fields(q, k, modifiers)
    whole = (sizes["batch"], q.shape[heads], sizes["seqlen_q"], sizes["seqlen_k"])
    problem = Problem(
        op="prefill",
        dtype=ARGUMENT_DTYPES[q.dtype],
        num_heads=q.shape[heads],
        num_kv_heads=k.shape[heads],
        head_dim=q.shape[-1],
        head_dim_v=v.shape[-1],
        causal=causal,
        layout=layout,
        **sizes,
        **modifier_fields("prefill", modifiers, q, *whole),
        **mask_fields("prefill", q, *whole, causal, modifiers.masks),
    )
    return reached_window(problem)


def decode_problem(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor | None,
    kv_layout: str,
    max_seqlen_k: int | None,
    lengths: str,
    pages: str,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    modifiers: Modifiers = NO_MODIFIERS,
) -> Problem:
    """The problem these tensors pose; q is (batch, seqlen_q, num_heads, head_dim).

    Without `max_seqlen_k` the cache's capacity stands for it. Raises ProblemError naming the
    argument that does not fit.
    """
    v_cache = _values_of("decode", k_cache, v_cache)
    check_tensors("decode", q, 4, QUANTISED_ARGUMENTS, k_cache=k_cache, v_cache=v_cache)
    check_rows_of_words("decode", k_cache, v_cache)
    batch, caches = q.shape[0], {"k_cache": k_cache, "v_cache": v_cache}
    kv_heads, page_size, capacity = cached_sizes(
        "decode", caches, q, batch, cache_seqlens, block_table, kv_layout
    )
    positions = modifiers.page_positions
    if positions is not None:
        pages, max_seqlen_k = CHOSEN, None  # a sequence may be longer than what is read of it
        _check_positions("decode", positions, block_table)
    elif pages == CHOSEN:
        raise ProblemError(f"decode: pages {CHOSEN!r} is for calls with page_positions")
    most = most_keys("decode", max_seqlen_k, capacity)
    head_shapes = ((kv_heads,), (batch, kv_heads))
    sizes = (batch, q.shape[2], q.shape[1])
    # of whole sequences where some pages of them are read
    keys, keys_with_ids = (
        capacity if positions is None or each is None or not each.dim() else each.shape[-1]
        for each in (modifiers.bias, modifiers.document_ids)
    )
    return Problem(
        op="decode",
        dtype=ARGUMENT_DTYPES[q.dtype],
        kv_dtype=(ARGUMENT_DTYPES | QUANTISED_ARGUMENTS)[k_cache.dtype],
        batch=batch,
        num_heads=q.shape[2],
        num_kv_heads=kv_heads,
        head_dim=q.shape[3],
        head_dim_v=v_cache.shape[3],
        seqlen_q=q.shape[1],
        seqlen_k=most,
        page_size=page_size,
        kv_layout=kv_layout,
        lengths=lengths,
        pages=pages,
        kv_scales=scales_granularity("decode", k_scale, v_scale, k_cache, head_shapes),
        **modifier_fields("decode", modifiers, q, *sizes, keys),
        **mask_fields("decode", q, *sizes, keys_with_ids, True, modifiers.masks),
    )


def scale_or_default(function: str, softmax_scale: float | None, head_dim: int) -> float:
    """What multiplies q k: head_dim ** -0.5 unless given. Raises ProblemError if it is negative.

    The running maximum is taken of the scaled scores, so the scale must keep their order.
    """
    if softmax_scale is None:
        return head_dim**-0.5
    if not 0.0 <= softmax_scale < float("inf"):
        raise ProblemError(f"{function}: softmax_scale {softmax_scale} is not from 0 upwards")
    return softmax_scale


def check_output(function: str, out: torch.Tensor, q: torch.Tensor, head_dim_v: int) -> None:
    """Raise ProblemError unless `out` can take the result for `q`."""
    if not isinstance(out, torch.Tensor):
        raise ProblemError(f"{function}: out must be a tensor, given {type(out).__name__}")
    shape = (*q.shape[:-1], head_dim_v)
    if tuple(out.shape) != shape or out.dtype != q.dtype or out.device != q.device:
        raise ProblemError(
            f"{function}: out must be {shape} {q.dtype} on {q.device},"
            f" given {tuple(out.shape)} {out.dtype} on {out.device}"
        )
    if out.stride(-1) != 1:
        raise ProblemError(f"{function}: out's last dimension must be contiguous")


def check_cache_entries(
    problem: Problem,
    k_cache: torch.Tensor,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor | None,
    page_positions: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    document_ids: torch.Tensor | None = None,
) -> None:
    """Raise ProblemError for a length or a used page id out of range. Waits for the device."""
    longest, shortest = int(cache_seqlens.max()), int(cache_seqlens.min())
    most = problem.seqlen_k
    if page_positions is not None:  # of longer sequences, all of whose keys a bias has, and ids
        most = bias.shape[-1] if bias is not None and bias.shape[-1:] > (1,) else INT32_LIMIT - 1
        most = most if document_ids is None else min(most, document_ids.shape[1])
    if shortest < 0 or longest > most:
        wrong = shortest if shortest < 0 else longest
        raise ProblemError(f"{problem.op}: cache_seqlens holds {wrong}, not in 0..{most}")
    if block_table is None:
        return
    used_pages = (cache_seqlens + problem.page_size - 1) // problem.page_size
    columns = torch.arange(block_table.shape[1], device=block_table.device)
    places = columns[None, :] if page_positions is None else page_positions
    used = (places >= 0) & (places < used_pages[:, None])
    bad = used & ((block_table < 0) | (block_table >= k_cache.shape[0]))
    if bool(bad.any()):
        row, column = bad.nonzero()[0].tolist()
        raise ProblemError(
            f"{problem.op}: block_table[{row}, {column}] is {int(block_table[row, column])},"
            f" the cache has pages 0..{k_cache.shape[0] - 1}"
        )


def cached_sizes(
    function: str,
    caches: dict[str, torch.Tensor],
    q: torch.Tensor,
    batch: int,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor | None,
    kv_layout: str,
) -> tuple[int, int, int]:
    """num_kv_heads, page_size and how many keys of a sequence `caches`, those of K and V, can hold.

    Raises ProblemError naming the argument that does not fit.
    """
    if kv_layout not in KV_LAYOUTS:
        raise ProblemError(
            f"{function}: kv_layout {kv_layout!r} is none of {', '.join(KV_LAYOUTS)}"
        )
    (of_k, k_cache), (of_v, v_cache) = caches.items()
    tokens, heads = (1, 2) if kv_layout == "nhd" else (2, 1)
    _expect(function, of_k, "head_dim", k_cache.shape[3], q.shape[-1])
    for name, axis in (("pages or batch", 0), ("tokens", tokens), ("num_kv_heads", heads)):
        _expect(function, of_v, name, v_cache.shape[axis], k_cache.shape[axis])
    check_index(function, "cache_seqlens", cache_seqlens, q.device, (batch,))
    kv_heads, capacity, page_size = k_cache.shape[heads], k_cache.shape[tokens], 0
    if block_table is None:
        _expect(function, of_k, "batch", k_cache.shape[0], batch)
    else:
        if block_table.dim() != 2:
            told = f"{block_table.dim()} dimensions, not (batch, most pages)"
            raise ProblemError(f"{function}: block_table has {told}")
        columns = block_table.shape[1]
        check_index(function, "block_table", block_table, q.device, (batch, columns))
        if columns and block_table.stride(1) != 1:
            raise ProblemError(f"{function}: block_table rows must be contiguous")
        page_size = capacity
        capacity = columns * page_size
    return kv_heads, page_size, capacity


def keys_held(k_cache: torch.Tensor, block_table: torch.Tensor | None, kv_layout: str) -> int:
    """How many keys of a sequence a cache that was checked can hold."""
    tokens = k_cache.shape[1 if kv_layout == "nhd" else 2]
    return tokens if block_table is None else tokens * block_table.shape[1]


def most_keys(function: str, max_seqlen_k: int | None, capacity: int) -> int:
    """`max_seqlen_k`, or the cache's capacity. Raises ProblemError for more than that."""
    if max_seqlen_k is None:
        return capacity
    if type(max_seqlen_k) is bool or not 0 <= max_seqlen_k <= capacity:
        raise ProblemError(
            f"{function}: max_seqlen_k {max_seqlen_k} is not from 0 to the cache's capacity"
            f" {capacity}"
        )
    return max_seqlen_k


def _check_positions(
    function: str, positions: torch.Tensor, block_table: torch.Tensor | None
) -> None:
    if block_table is None:
        raise ProblemError(f"{function}: page_positions is for a cache in pages, of a block_table")
    check_index(function, "page_positions", positions, block_table.device, tuple(block_table.shape))
    if positions.shape[1] > 0 and positions.stride(1) != 1:
        raise ProblemError(f"{function}: page_positions rows must be contiguous")


def _values_of(function: str, k_cache: torch.Tensor, v_cache: torch.Tensor | None) -> torch.Tensor:
    """`v_cache`, or where it is not given, as of latent attention, what of the keys it is."""
    width, values = LATENT_WIDTHS
    latent = k_cache.shape[-1:] == (width,)
    if latent and v_cache is not None:
        raise ProblemError(
            f"{function}: v_cache must be None with keys {width} wide:"
            f" their first {values} channels are the values"
        )
    if v_cache is None and not latent:
        raise ProblemError(f"{function}: v_cache is None, which is for keys {width} wide")
    return k_cache[..., :values] if v_cache is None else v_cache


def check_tensors(
    function: str,
    q: torch.Tensor,
    dimensions: int,
    also: Collection[torch.dtype] = (),
    of_others: int | None = None,
    **others: torch.Tensor,
) -> None:
    """Raise ProblemError for a tensor that no kernel can read.

    `also` are types that the others may have though q has another, `of_others` the dimensions.
    """
    for name, tensor in {"q": q, **others}.items():
        expected = dimensions if name == "q" or of_others is None else of_others
        if tensor.dim() != expected:
            told = f"{tensor.dim()} dimensions, not {expected}"
            raise ProblemError(f"{function}: {name} has {told}")
        quantised = tensor.dtype in also and name != "q"
        if tensor.dtype not in ARGUMENT_DTYPES and not quantised:
            raise ProblemError(f"{function}: {name} is {tensor.dtype}, not bf16, fp16 or fp32")
        if tensor.dtype != q.dtype and not quantised:
            raise ProblemError(f"{function}: {name} is {tensor.dtype}, q is {q.dtype}")
        if tensor.device != q.device:
            raise ProblemError(f"{function}: {name} is on {tensor.device}, q is on {q.device}")
        if tensor.numel() and tensor.stride(-1) != 1:
            raise ProblemError(f"{function}: {name}'s last dimension must be contiguous")
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise ProblemError(
                f"{function}: {name} requires grad and there is no backward yet;"
                " call under torch.no_grad()"
            )


def check_rows_of_words(function: str, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    """Raise ProblemError unless both caches have one type, and quantised rows begin with a word."""
    if v_cache.dtype != k_cache.dtype:
        raise ProblemError(f"{function}: v_cache is {v_cache.dtype}, k_cache is {k_cache.dtype}")
    if k_cache.dtype not in QUANTISED_ARGUMENTS:
        return
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        # two channels are read as one word
        if any(place % 2 for place in (*cache.stride()[:3], cache.storage_offset())):
            raise ProblemError(f"{function}: {name} has rows that begin at odd bytes")


def check_index(
    function: str,
    name: str,
    tensor: torch.Tensor,
    device: torch.device,
    shape: tuple[int, ...],
) -> None:
    """Raise ProblemError unless the tensor holds whole numbers, of this shape on this device."""
    if tensor.dtype not in INDEX_DTYPES:
        raise ProblemError(f"{function}: {name} is {tensor.dtype}, not int32 or int64")
    if tensor.device != device:
        raise ProblemError(f"{function}: {name} is on {tensor.device}, q is on {device}")
    if tuple(tensor.shape) != shape:
        raise ProblemError(f"{function}: {name} is {tuple(tensor.shape)}, expected {shape}")


def _expect(function: str, name: str, what: str, given: int, expected: int) -> None:
    if given != expected:
        raise ProblemError(f"{function}: {name} has {what} {given}, expected {expected}")
