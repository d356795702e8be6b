"""The functions as operators of torch, in a namespace of this module's own, for torch.compile.

A graph holds the operator and never looks inside; called eagerly the functions are cheaper as they
are. Where the tables carry a backward, prefill has its gradients by an operator too.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import torch

from .installed import installed
from .masks import FLAT_MASKS, QueryLists, any_given, flat_blocks, flat_masks, query_lists
from .problem import LATENT_WIDTHS, ProblemError
from .scales import Scale, scale_number
from .schemas import (
    APPEND_LEFT_OUT,
    CHUNKS_LEFT_OUT,
    DECODE_LEFT_OUT,
    MASKS_LEFT_OUT,
    OPERATOR_SCHEMAS,
    PREFILL_LEFT_OUT,
    STEP_MASKS_LEFT_OUT,
)
from .traced_gradients import (
    blocks_given,
    differentiable,
    gradient_results,
    masked_gradient_results,
    run_gradients,
    run_masked_gradients,
    without_training,
)
from .training import refuse_slopes

MASKS = len(MASKS_LEFT_OUT) - len(PREFILL_LEFT_OUT)  # options of masked ones before all others

_libraries: list[torch.library.Library] = []  # an operator lives as long as its library
_operators: dict[str, Any] = {}
_carries_backward = [False]


def register_operators(
    namespace: str,
    prefill: Callable[..., Any],
    decode: Callable[..., Any],
    append_kv: Callable[..., Any],
    merge: Callable[..., Any],
) -> None:
    """Define the operators that call these functions.

    A module that is imported twice in a process has two namespaces, and each its own counts.
    """
    tried = (f"{namespace}_{number}" if number else namespace for number in count())
    own = next(name for name in tried if not hasattr(getattr(torch.ops, name), "prefill"))
    library = torch.library.Library(own, "FRAGMENT")
    kernels = _kernels(prefill, decode, append_kv, merge)
    shapes: dict[str, Callable[..., Any]] = {
        "prefill": _prefill_results,
        "prefill_out": lambda q, k, v, out, *given: _prefill_results(q, k, v, *given)[1],
        "prefill_masked": lambda q, k, v, *given: _prefill_results(q, k, v, *given[MASKS:]),
        "prefill_masked_out": lambda q, k, v, out, *given: _prefill_results(
            q, k, v, *given[MASKS:]
        )[1],
        "prefill_chunked": lambda q, k, v, *given: _prefill_results(q, k, v, *given[3:]),
        "prefill_chunked_out": lambda q, k, v, *given: _prefill_results(q, k, v, *given[4:])[1],
        "prefill_gradients": gradient_results,
        "prefill_masked_gradients": masked_gradient_results,
        "decode": _decode_results,
        "decode_out": lambda *given: _decode_results(*given)[1],
        "decode_masked": _decode_results,
        "decode_masked_out": lambda *given: _decode_results(*given)[1],
        "append_kv": lambda *given: None,
        "merge": lambda out, lse, *given: (torch.empty_like(out), torch.empty_like(lse)),
    }
    for name, schema in OPERATOR_SCHEMAS.items():
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        for device in ("CUDA", "CPU"):  # of the CPU, in triton's interpreter
            library.impl(name, kernels[name], device)
        torch.library.register_fake(f"{own}::{name}", shapes[name], lib=library)
        _operators[name] = getattr(getattr(torch.ops, own), name).default
    _carries_backward[:] = [("backward",) in installed().tables.names]
    trained = {"prefill": PREFILL_LEFT_OUT, "prefill_masked": MASKS_LEFT_OUT}
    for name, options in trained.items() if _carries_backward[0] else ():
        both = (_operators[name], _operators[f"{name}_gradients"])
        run = differentiable(*both, kernels[name], options)
        library.impl(name, run, "Autograd", with_keyset=True)
    _libraries.append(library)


def operator_namespace() -> str:
    """Where the operators are: `torch.ops.<this>.prefill`, decode, append_kv and the rest."""
    return _operators["prefill"].namespace


def prefill_traced(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    window: tuple[int, int],
    softmax_scale: float | None,
    softcap: float,
    tensors: tuple[torch.Tensor | None, ...],
    layout: str,
    packing: tuple[torch.Tensor | int | None, ...],
    masks: tuple[Any, ...],
    pages: tuple[torch.Tensor | None, torch.Tensor | None, str],
    dropout: tuple[float, torch.Tensor | None],
    check: bool,
    deterministic: bool,
    out: torch.Tensor | None,
    return_lse: bool,
) -> Any:
    """prefill() of a graph that torch.compile makes.

    `tensors` are slopes, bias and sinks, `packing` both cu_seqlens and both maxima, `masks` what
    prefill() takes from block_mask to density, `pages` from cache_seqlens to kv_layout, `dropout`
    its dropout_p and rng.
    """
    *tables, kv_layout = pages
    paged, asked = tables[1] is not None, _asks_gradients(q, k, v, *tensors)
    if not _carries_backward[0] or out is not None or paged:
        _refuse_traced_gradients("prefill", q, k, v, *tensors)
    elif torch.is_grad_enabled():
        refuse_slopes(tensors[0])
    masked, packed = any_given(masks), packing[0] is not None
    # the forward tells where it may be alone, as that of a plain call never is in such a module
    alone = masked or (packed and tensors[1] is not None) or v.shape[-1] != q.shape[-1]
    numbers = (causal, softmax_scale, layout, *window, softcap)
    options = (*numbers, *tensors, *packing, deterministic, check, *dropout, asked and alone)
    if not masked:
        if paged:
            options = (kv_layout, *options)
            return _called("prefill_chunked", (q, k, v, *tables), options, out, return_lse)
        return _called("prefill", (q, k, v), options, out, return_lse)
    by_keys = query_lists(masks[0]) if asked else (None,) * len(QueryLists._fields)
    options = (*flat_masks(causal, *masks), *pages, *by_keys, *options)
    return _called("prefill_masked", (q, k, v), options, out, return_lse)


def decode_traced(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor | None,
    scales: tuple[Scale | None, Scale | None],
    kv_layout: str,
    hints: tuple[int | None, str, str],
    modified: tuple[Any, ...],
    masks: tuple[Any, ...],
    softmax_scale: float | None,
    check: bool,
    out: torch.Tensor | None,
    return_lse: bool,
) -> Any:
    """decode() of a graph that torch.compile makes.

    `hints` are max_seqlen_k, lengths and pages, `modified` slopes, bias, sinks, positions of pages,
    both sides of the window and the softcap, `masks` what decode() takes from block_mask to
    density.
    """
    _refuse_traced_gradients("decode", q, k_cache, v_cache, *modified[:3])
    max_seqlen_k, *distribution = hints
    *tensors, left, right, softcap = modified
    options = (
        *(block_table, max_seqlen_k, kv_layout, softmax_scale),
        *(*_tensors_and_numbers(*scales), left, right, softcap, *tensors, *distribution, check),
    )
    read = (q, k_cache, v_cache, cache_seqlens)
    if any_given(masks):
        block_mask, ids, prefix, mask, density = masks
        blocks = flat_blocks("decode", block_mask, mask is not None)
        options = (mask, ids, prefix, density, *blocks, *options)
        return _called("decode_masked", read, options, out, return_lse)
    return _called("decode", read, options, out, return_lse)


def append_kv_traced(
    tensors: tuple[torch.Tensor, ...], scales: tuple[Scale | None, Scale | None], kv_layout: str
) -> None:
    """append_kv() of a graph that torch.compile makes."""
    _operators["append_kv"](*tensors, *_tensors_and_numbers(*scales), kv_layout)


def merge_traced(*values: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """merge() of a graph that torch.compile makes."""
    return _operators["merge"](*values)


def _called(
    name: str,
    read: tuple[Any, ...],
    options: tuple[Any, ...],
    out: torch.Tensor | None,
    return_lse: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    if out is None:
        result, lse = _operators[name](*read, *options)
    else:
        result, lse = out, _operators[f"{name}_out"](*read, out, *options)
    return (result, lse) if return_lse else result


def _refuse_traced_gradients(function: str, *tensors: torch.Tensor | None) -> None:
    if _asks_gradients(*tensors):
        raise ProblemError(
            f"{function}: there is no backward yet of such a call in a graph;"
            " call under torch.no_grad()"
        )


def _asks_gradients(*tensors: torch.Tensor | None) -> bool:
    asked = [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]
    return len(asked) > 0 and torch.is_grad_enabled()


def _tensors_and_numbers(*scales: Scale | None) -> tuple[Any, ...]:
    """Scales as operators take them: the tensors among them, then the numbers."""
    numbers = [scale_number(scale) for scale in scales]
    tensors = [scale if isinstance(scale, torch.Tensor) else None for scale in scales]
    return (*tensors, *numbers)


def _kernels(
    prefill: Callable[..., Any],
    decode: Callable[..., Any],
    append_kv: Callable[..., Any],
    merge: Callable[..., Any],
) -> dict[str, Callable[..., Any]]:
    """What the operators run: the functions with the operators' arguments.

    The dispatcher hands on no options past the last one that is no default. Those given most are
    named, as a call by a dictionary takes thrice the time.
    """

    def run_prefill(
        q: Any,
        k: Any,
        v: Any,
        causal: bool = False,
        softmax_scale: float | None = None,
        layout: str = "bshd",
        *rarer: Any,
        out: Any = None,
    ) -> Any:
        if rarer:
            given = dict(zip(PREFILL_LEFT_OUT, (causal, softmax_scale, layout, *rarer)))
            given = without_training(q, k, v, given)
            return prefill(q, k, v, out=out, return_lse=True, **_with_window(given))
        return prefill(
            q,
            k,
            v,
            causal=causal,
            softmax_scale=softmax_scale,
            layout=layout,
            out=out,
            return_lse=True,
        )

    def run_masked(q: Any, k: Any, v: Any, *options: Any, out: Any = None) -> Any:
        given = without_training(q, k, v, MASKS_LEFT_OUT | dict(zip(MASKS_LEFT_OUT, options)))
        given = _with_window(given)
        blocks = blocks_given(given)
        for name in (*FLAT_MASKS[:6], *QueryLists._fields):
            del given[name]
        return prefill(q, k, v, block_mask=blocks, out=out, return_lse=True, **given)

    def run_chunked(
        q: Any, k: Any, v: Any, lengths: Any, table: Any, *options: Any, out: Any = None
    ) -> Any:
        given = _with_window(without_training(q, k, v, dict(zip(CHUNKS_LEFT_OUT, options))))
        given |= {"cache_seqlens": lengths, "block_table": table}
        return prefill(q, k, v, out=out, return_lse=True, **given)

    def run_decode(
        q: Any,
        k_cache: Any,
        v_cache: Any,
        cache_seqlens: Any,
        block_table: Any = None,
        max_seqlen_k: int | None = None,
        kv_layout: str = "nhd",
        softmax_scale: float | None = None,
        *rarer: Any,
        out: Any = None,
    ) -> Any:
        read = (q, k_cache, v_cache, cache_seqlens)
        if rarer:
            options = (block_table, max_seqlen_k, kv_layout, softmax_scale, *rarer)
            given = _with_scales(_with_window(dict(zip(DECODE_LEFT_OUT, options))))
            return decode(*read, out=out, return_lse=True, **given)
        return decode(
            *read,
            block_table=block_table,
            max_seqlen_k=max_seqlen_k,
            kv_layout=kv_layout,
            softmax_scale=softmax_scale,
            out=out,
            return_lse=True,
        )

    def run_decode_masked(*given: Any, out: Any = None) -> Any:
        told = STEP_MASKS_LEFT_OUT | dict(zip(STEP_MASKS_LEFT_OUT, given[4:]))
        options = _with_scales(_with_window(told))
        blocks = blocks_given(options)
        for name in FLAT_MASKS[:6]:
            del options[name]
        return decode(*given[:4], block_mask=blocks, out=out, return_lse=True, **options)

    def run_append(*tensors: Any) -> None:
        append_kv(*tensors[:5], **_with_scales(dict(zip(APPEND_LEFT_OUT, tensors[5:]))))

    return {
        "prefill": run_prefill,
        "prefill_out": _into(run_prefill, 3),
        "prefill_masked": run_masked,
        "prefill_masked_out": _into(run_masked, 3),
        "prefill_chunked": run_chunked,
        "prefill_chunked_out": _into(run_chunked, 5),
        "prefill_gradients": run_gradients,
        "prefill_masked_gradients": run_masked_gradients,
        "decode": run_decode,
        "decode_out": _into(run_decode, 4),
        "decode_masked": run_decode_masked,
        "decode_masked_out": _into(run_decode_masked, 4),
        "append_kv": run_append,
        "merge": lambda *parts: merge(*parts[:4], **dict(zip(("layout",), parts[4:]))),
    }


def _into(run: Callable[..., Any], read: int) -> Callable[..., Any]:
    """What gives `lse` alone: the argument after the first `read` is `out`, which is written."""
    return lambda *given: run(*given[:read], *given[read + 1 :], out=given[read])[1]


def _with_window(given: dict[str, Any]) -> dict[str, Any]:
    """Options with both sides of the window in one place."""
    if "window_left" in given:
        given["window"] = (given.pop("window_left"), given.pop("window_right", -1))
    return given


def _with_scales(given: dict[str, Any]) -> dict[str, Any]:
    """Options with each scale, a tensor or a number, in one place."""
    for name in ("k", "v"):
        number = given.pop(f"{name}_number", None)
        if number is not None:
            given[f"{name}_scale"] = number
    return given


def _prefill_results(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> Any:
    """What prefill gives for tensors of these shapes, without values."""
    layout = dict(zip(PREFILL_LEFT_OUT, options)).get("layout", PREFILL_LEFT_OUT["layout"])
    if q.dim() == 3:  # packed sequences
        shape = (q.shape[1], q.shape[0])
    else:
        tokens, heads = (1, 2) if layout == "bshd" else (2, 1)
        shape = (q.shape[0], q.shape[heads], q.shape[tokens])
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, q.new_empty(shape, dtype=torch.float32)


def _decode_results(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor | None, *_: Any
) -> Any:
    """The same of decode."""
    width = LATENT_WIDTHS[1] if v_cache is None else v_cache.shape[-1]
    shape = (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else q.shape[:2]
    out = q.new_empty((*q.shape[:-1], width))
    return out, q.new_empty(shape, dtype=torch.float32)
