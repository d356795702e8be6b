"""Quantised caches and their scales: what a caller gives, and its one form for plans."""

from __future__ import annotations

import torch

from .problem import KV_SCALES, NONE, ProblemError

QUANTISED_ARGUMENTS = {torch.float8_e4m3fn: "fp8_e4m3", torch.int8: "int8"}

QUANTISED_WORDS = {torch.float8_e4m3fn: torch.uint16, torch.int8: torch.int16}

# A scale is what a stored 1 counts: a number, a tensor of one for everything, of one for each KV
# head, or of one for each KV head of each token.
Scale = float | torch.Tensor


def scale_number(scale: Scale | None) -> float | None:
    """The scale if it is a number."""
    return None if scale is None or isinstance(scale, torch.Tensor) else scale


def scales_granularity(
    function: str,
    k_scale: Scale | None,
    v_scale: Scale | None,
    cache: torch.Tensor,
    head_shapes: tuple[tuple[int, ...], ...],
) -> str:
    """The problem's `kv_scales`: the finer of both scales'.

    `cache` is of K, of whose shape V's is; `head_shapes` are those of a scale for each KV head.
    Raises ProblemError naming the scale that does not fit.
    """
    if cache.dtype not in QUANTISED_ARGUMENTS:
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            if scale is not None:
                raise ProblemError(
                    f"{function}: {name} is for a quantised cache, not {cache.dtype}"
                )
        return NONE
    kinds = [
        _scale_kind(function, name, scale, cache, head_shapes)
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale))
    ]
    if ("token" in kinds) and kinds[0] != kinds[1]:
        raise ProblemError(f"{function}: k_scale is per {kinds[0]} and v_scale per {kinds[1]}")
    return max(kinds, key=KV_SCALES.index)


def cache_form(cache: torch.Tensor) -> torch.Tensor:
    """A cache as plans take it: two channels of a quantised one are a word, whose type tells."""
    words = QUANTISED_WORDS.get(cache.dtype)
    return cache if words is None else cache.view(words)


def scale_form(scale: Scale, kv_scales: str, batch: int, heads: int) -> Scale:
    """A scale as plans take it: a number, (batch, num_kv_heads), or as it is for each token."""
    if not isinstance(scale, torch.Tensor):
        return float(scale)
    if kv_scales == "token":
        return scale
    if scale.numel() == 1:
        scale = scale.reshape(1)
    return scale.expand(batch, heads)


def _scale_kind(
    function: str,
    name: str,
    scale: Scale | None,
    cache: torch.Tensor,
    head_shapes: tuple[tuple[int, ...], ...],
) -> str:
    if scale is None:
        raise ProblemError(f"{function}: a {cache.dtype} cache needs {name}; 1.0 if there is none")
    if not isinstance(scale, torch.Tensor):
        if not 0.0 < scale < float("inf"):
            raise ProblemError(f"{function}: {name} {scale} is not positive")
        return "tensor"
    if scale.dtype != torch.float32:
        raise ProblemError(f"{function}: {name} is {scale.dtype}, not fp32")
    if scale.device != cache.device:
        raise ProblemError(f"{function}: {name} is on {scale.device}, the cache on {cache.device}")
    if scale.numel() == 1:
        return "tensor"
    per_token = tuple(cache.shape[:3])
    if tuple(scale.shape) == per_token:
        return "token"
    if tuple(scale.shape) in head_shapes:
        return "head"
    allowed = ", ".join(map(str, head_shapes))
    raise ProblemError(
        f"{function}: {name} is {tuple(scale.shape)}; one number, {allowed} or {per_token} were"
        " expected"
    )
