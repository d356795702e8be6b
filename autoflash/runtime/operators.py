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
from .masks import FLAT_MASKS, BlockLists, flat_masks
from .modifiers import Modifiers
from .problem import LATENT_WIDTHS, ProblemError
from .scales import Scale, scale_number
from .training import prefill_gradients, refuse_slopes, training_of

PREFILL_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? alibi_slopes, Tensor? bias, Tensor? sinks, bool causal,"
    " SymInt window_left, SymInt window_right, float? softmax_scale, float softcap, str layout,"
    " Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt? max_seqlen_q, SymInt? max_seqlen_k,"
    " Tensor? kv_num_blocks, Tensor? kv_indices, Tensor? full_kv_num_blocks,"
    " Tensor? full_kv_indices, SymInt mask_block_q, SymInt mask_block_k, Tensor? document_ids,"
    " Tensor? prefix_lens, str? mask, SymInt? density, bool check, bool deterministic"
)
DECODE_SCHEMA = (
    "Tensor q, Tensor k_cache, Tensor? v_cache, Tensor cache_seqlens, Tensor? block_table,"
    " Tensor? k_scale, Tensor? v_scale, float? k_number, float? v_number, str kv_layout,"
    " SymInt? max_seqlen_k, str lengths, str pages, Tensor? alibi_slopes, Tensor? sinks,"
    " Tensor? page_positions, SymInt window_left, SymInt window_right, float softcap,"
    " float? softmax_scale, bool check"
)
MERGE_SCHEMA = "Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, str layout"
APPEND_SCHEMA = (
    "Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping,"
    " Tensor(c!)? k_scale, Tensor(d!)? v_scale, float? k_number, float? v_number, str kv_layout"
)
OPERATOR_SCHEMAS = {
    "prefill": f"({PREFILL_SCHEMA}) -> (Tensor out, Tensor lse)",
    "prefill_out": f"({PREFILL_SCHEMA}, Tensor(a!) out) -> Tensor lse",
    "prefill_gradients": (
        f"({PREFILL_SCHEMA}, Tensor out, Tensor lse, Tensor? dout, Tensor? dlse, bool of_bias,"
        " bool of_sinks) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)"
    ),
    "decode": f"({DECODE_SCHEMA}) -> (Tensor out, Tensor lse)",
    "decode_out": f"({DECODE_SCHEMA}, Tensor(a!) out) -> Tensor lse",
    "append_kv": f"({APPEND_SCHEMA}) -> ()",
    "merge": f"({MERGE_SCHEMA}) -> (Tensor out, Tensor lse)",
}

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
    shapes = {
        "prefill": _prefill_results,
        "prefill_out": lambda *given: _prefill_results(*given[:-1])[1],
        "prefill_gradients": _gradient_results,
        "decode": _decode_results,
        "decode_out": lambda *given: _decode_results(*given[:-1])[1],
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
    if _carries_backward[0]:
        torch.library.register_autograd(
            f"{own}::prefill", _prefill_backward, setup_context=_keep_for_backward, lib=library
        )
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
    check: bool,
    deterministic: bool,
    out: torch.Tensor | None,
    return_lse: bool,
) -> Any:
    """prefill() of a graph that torch.compile makes.

    `tensors` are slopes, bias and sinks, `packing` both cu_seqlens and both maxima, `masks` what
    prefill() takes from block_mask to density.
    """
    if not _carries_backward[0] or out is not None or masks != (None,) * 5:
        _refuse_traced_gradients("prefill", q, k, v, *tensors)
    elif torch.is_grad_enabled():
        refuse_slopes(tensors[0])
    numbers = (causal, *window, softmax_scale, softcap, layout)
    flat = flat_masks(causal, *masks)
    values = (q, k, v, *tensors, *numbers, *packing, *flat, check, deterministic)
    return _called("prefill", values, out, return_lse)


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
    softmax_scale: float | None,
    check: bool,
    out: torch.Tensor | None,
    return_lse: bool,
) -> Any:
    """decode() of a graph that torch.compile makes.

    `modified` are slopes, sinks, positions of pages, both sides of the window and the softcap.
    """
    _refuse_traced_gradients("decode", q, k_cache, v_cache, *modified[:2])
    read = (q, k_cache, v_cache, cache_seqlens, block_table)
    numbers = (kv_layout, *hints, *modified, softmax_scale, check)
    return _called("decode", (*read, *_tensors_and_numbers(*scales), *numbers), out, return_lse)


def append_kv_traced(
    tensors: tuple[torch.Tensor, ...], scales: tuple[Scale | None, Scale | None], kv_layout: str
) -> None:
    """append_kv() of a graph that torch.compile makes."""
    _operators["append_kv"](*tensors, *_tensors_and_numbers(*scales), kv_layout)


def merge_traced(*values: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """merge() of a graph that torch.compile makes."""
    return _operators["merge"](*values)


def _called(
    name: str, values: tuple[Any, ...], out: torch.Tensor | None, return_lse: bool
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    if out is None:
        result, lse = _operators[name](*values)
    else:
        result, lse = out, _operators[f"{name}_out"](*values, out)
    return (result, lse) if return_lse else result


def _refuse_traced_gradients(function: str, *tensors: torch.Tensor | None) -> None:
    asked = [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]
    if asked and torch.is_grad_enabled():
        raise ProblemError(f"{function}: there is no backward yet; call under torch.no_grad()")


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
    """What the operators run: the functions with the operators' arguments."""

    def run_prefill(q: Any, k: Any, v: Any, *rest: Any) -> Any:
        names = (
            *("alibi_slopes", "bias", "sinks", "causal", "left", "right"),
            *("softmax_scale", "softcap", "layout"),
            *("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
            *FLAT_MASKS,
            *("check", "deterministic", "out"),
        )
        given = dict(zip(names, rest))
        window = (given.pop("left"), given.pop("right"))
        blocks = [given.pop(name) for name in FLAT_MASKS[:6]]
        if blocks[0] is not None:
            counts, indices, full, full_indices, *sizes = blocks
            given["block_mask"] = BlockLists(counts, indices, full, full_indices, tuple(sizes))
        return prefill(q, k, v, window=window, return_lse=True, **given)

    def run_decode(q: Any, k_cache: Any, v_cache: Any, cache_seqlens: Any, *rest: Any) -> Any:
        table, k_scale, v_scale, k_number, v_number, *others = rest
        names = (
            *("kv_layout", "max_seqlen_k", "lengths", "pages", "alibi_slopes", "sinks"),
            *("page_positions", "left", "right", "softcap", "softmax_scale", "check", "out"),
        )
        given = dict(zip(names, others))
        return decode(
            q,
            k_cache,
            v_cache,
            cache_seqlens,
            block_table=table,
            k_scale=k_number if k_scale is None else k_scale,
            v_scale=v_number if v_scale is None else v_scale,
            return_lse=True,
            window=(given.pop("left"), given.pop("right")),
            **given,
        )

    def run_append(*given: Any) -> None:
        *tensors, k_scale, v_scale, k_number, v_number, kv_layout = given
        append_kv(
            *tensors,
            kv_layout=kv_layout,
            k_scale=k_number if k_scale is None else k_scale,
            v_scale=v_number if v_scale is None else v_scale,
        )

    return {
        "prefill": run_prefill,
        "prefill_out": lambda *given: run_prefill(*given)[1],
        "prefill_gradients": _run_gradients,
        "decode": run_decode,
        "decode_out": lambda *given: run_decode(*given)[1],
        "append_kv": run_append,
        "merge": lambda *given: merge(*given[:4], layout=given[4]),
    }


PREFILL_INPUTS = 28  # of the operator, the tensors among them by their places
PREFILL_TENSORS = (0, 1, 2, 3, 4, 5, 12, 13, 16, 17, 18, 19, 22, 23)
BIAS, SINKS = 4, 5


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    ctx.save_for_backward(*(inputs[place] for place in PREFILL_TENSORS), *output)
    ctx.others = tuple(
        None if place in PREFILL_TENSORS else given for place, given in enumerate(inputs)
    )


def _prefill_backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:
    *tensors, out, lse = ctx.saved_tensors
    inputs = list(ctx.others)
    for place, tensor in zip(PREFILL_TENSORS, tensors):
        inputs[place] = tensor
    of_bias, of_sinks = ctx.needs_input_grad[BIAS], ctx.needs_input_grad[SINKS]
    operator = _operators["prefill_gradients"]
    *found, dbias, dsinks = operator(*inputs, out, lse, dout, dlse, of_bias, of_sinks)
    of_modifiers = (None, dbias if of_bias else None, dsinks if of_sinks else None)
    return *found, *of_modifiers, *[None] * (PREFILL_INPUTS - SINKS - 1)


def _run_gradients(*given: Any) -> tuple[torch.Tensor, ...]:
    """What the operator of gradients runs; of what is not asked for there is nothing."""
    inputs, (out, lse, dout, dlse, of_bias, of_sinks) = (
        given[:PREFILL_INPUTS],
        given[PREFILL_INPUTS:],
    )
    q, k, v, slopes, bias, sinks, causal, left, right, scale, softcap, layout = inputs[:12]
    packing, deterministic = inputs[12:16], inputs[-1]
    on = [
        name
        for name, given in zip(FLAT_MASKS, inputs[16:])
        if isinstance(given, (torch.Tensor, str))
    ]
    if on:
        raise ProblemError(f"prefill: with gradients: {', '.join(on)} are not served yet")
    modifiers = Modifiers((left, right), softcap, slopes, bias, sinks, *packing)
    training = training_of(q, k, v, causal, layout, modifiers, scale, deterministic)
    dbias = bias.new_empty(bias.shape) if of_bias else None
    dsinks = sinks.new_empty(sinks.shape) if of_sinks else None
    forward = (q, k, v, out, lse, dout, dlse)
    found = prefill_gradients(training, modifiers, dbias, dsinks, *forward)
    return *found, *(q.new_empty(0) if each is None else each for each in (dbias, dsinks))


def _gradient_results(*given: Any) -> tuple[torch.Tensor, ...]:
    """The same without values."""
    *_, of_bias, of_sinks = given
    found = [each.new_empty(each.shape) for each in given[:3]]
    for asked, place in ((of_bias, BIAS), (of_sinks, SINKS)):
        found.append(given[place].new_empty(given[place].shape) if asked else given[0].new_empty(0))
    return tuple(found)


def _prefill_results(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> Any:
    """What prefill gives for tensors of these shapes, without values."""
    if q.dim() == 3:  # packed sequences
        shape = (q.shape[1], q.shape[0])
    else:
        tokens, heads = (1, 2) if rest[8] == "bshd" else (2, 1)
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
