"""Appending to a cache: the arguments of append_kv(), checked, and the scales its plan takes."""

from __future__ import annotations

import torch

from .arguments import ARGUMENT_DTYPES, check_index, check_rows_of_words
from .problem import KV_LAYOUTS, ProblemError
from .scales import QUANTISED_ARGUMENTS, Scale, scales_granularity


def append_switches(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_layout: str,
    k_scale: Scale | None,
    v_scale: Scale | None,
) -> tuple[str, ...]:
    """The switches of the text that serves the call. Raises ProblemError naming what is wrong."""
    if kv_layout not in KV_LAYOUTS:
        raise ProblemError(f"append_kv: kv_layout {kv_layout!r} is none of {', '.join(KV_LAYOUTS)}")
    heads = 2 if kv_layout == "nhd" else 1
    for name, tensor, dimensions in (
        ("k", k, 3),
        ("v", v, 3),
        ("k_cache", k_cache, 4),
        ("v_cache", v_cache, 4),
    ):
        if tensor.dim() != dimensions:
            raise ProblemError(f"append_kv: {name} has {tensor.dim()} dimensions, not {dimensions}")
        if tensor.device != k.device:
            raise ProblemError(f"append_kv: {name} is on {tensor.device}, k is on {k.device}")
        if tensor.numel() and tensor.stride(-1) != 1:
            raise ProblemError(f"append_kv: {name}'s last dimension must be contiguous")
    if k.dtype not in ARGUMENT_DTYPES:
        raise ProblemError(f"append_kv: k is {k.dtype}, not bf16, fp16 or fp32")
    quantised = k_cache.dtype in QUANTISED_ARGUMENTS
    expected = {
        "v": (v, tuple(k.shape), k.dtype),
        "k_cache": (k_cache, None, k_cache.dtype if quantised else k.dtype),
        "v_cache": (v_cache, tuple(k_cache.shape), k_cache.dtype),
    }
    for name, (tensor, shape, dtype) in expected.items():
        if shape is not None and tuple(tensor.shape) != shape:
            raise ProblemError(f"append_kv: {name} is {tuple(tensor.shape)}, expected {shape}")
        if tensor.dtype != dtype:
            raise ProblemError(f"append_kv: {name} is {tensor.dtype}, expected {dtype}")
    if (k_cache.shape[heads], k_cache.shape[3]) != tuple(k.shape[1:]):
        raise ProblemError(
            f"append_kv: k_cache has {k_cache.shape[heads]} heads of {k_cache.shape[3]},"
            f" k has {k.shape[1]} of {k.shape[2]}"
        )
    check_index("append_kv", "slot_mapping", slot_mapping, k.device, (k.shape[0],))
    check_rows_of_words("append_kv", k_cache, v_cache)
    head_shapes = ((k.shape[1],),)
    granularity = scales_granularity("append_kv", k_scale, v_scale, k_cache, head_shapes)
    if not quantised:
        return ()
    return ("quantised", "token_scales") if granularity == "token" else ("quantised",)


def append_scale(scale: Scale, num_kv_heads: int) -> Scale:
    """A scale as the plan takes it: a number, (num_kv_heads,), or as it is for each token."""
    if not isinstance(scale, torch.Tensor):
        return float(scale)
    if scale.numel() == 1 and scale.dim() < 3:
        return scale.reshape(1).expand(num_kv_heads)
    return scale


def append_cache(cache: torch.Tensor) -> torch.Tensor:
    """A cache as the plan takes it: fp8 as the bytes that are stored, not every GPU knows it."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache
