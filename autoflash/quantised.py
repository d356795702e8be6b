"""Quantised caches of inputs: random values in bytes, their scales, and what they stand for."""

import torch

from autoflash.problem import Problem

QUANTISED_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}
LIMITS = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}  # the largest value of a step of 1
POISON_BYTES = {torch.float8_e4m3fn: 0x7F, torch.int8: 0x80}  # NaN, and what is never stored
VALUES_AT_ONCE = 2**26  # bounds what is held in fp32 while a large cache is made


def quantised(
    cache: torch.Tensor,
    problem: Problem,
    generator: torch.Generator | None,
    deviation: float,
    largest: float,
) -> torch.Tensor:
    """Fill an empty `cache` with normal values of this deviation, quantised; its scales in fp32.

    The scales are (batch, num_kv_heads), of which equal ones are stored once, or for `kv_scales`
    "token" of the cache's shape without head_dim. Values of more than `largest` are cut off at it,
    or at up to twice it: each head of `kv_scales` "head" has a range of its own.
    """
    limit, p = LIMITS[cache.dtype], problem
    head_axis = 2 if p.kv_layout == "nhd" else 1
    if p.kv_scales == "token":
        scales = torch.empty(cache.shape[:-1], device=cache.device)
        steps = scales.unsqueeze(-1)
    else:
        own = torch.arange(p.num_kv_heads, device=cache.device) / p.num_kv_heads
        step = largest / limit * (1 + own * (p.kv_scales == "head"))
        scales = step.expand(p.batch, -1)
        if p.kv_scales == "tensor":
            scales = step[:1].expand(p.batch, p.num_kv_heads)
        shape = [1, 1, 1, 1]
        shape[head_axis] = p.num_kv_heads
        steps = step.view(shape).expand(*cache.shape[:-1], 1)
    if cache.is_meta:
        return scales
    at_once = max(1, VALUES_AT_ONCE // cache[0].numel())
    for stored, step in zip(cache.split(at_once), steps.split(at_once), strict=True):
        values = torch.randn(stored.shape, device=cache.device, generator=generator) * deviation
        if p.kv_scales == "token":
            step.copy_(values.abs().amax(dim=-1, keepdim=True) / limit)
        values = (values / step).clamp_(-limit, limit)
        stored.copy_(values.round_() if cache.dtype == torch.int8 else values)
    return scales


def dequantised(stored: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What stored values stand for, in fp64, which holds it exactly."""
    return stored.double() * scales.double()


def spoil(cache: torch.Tensor, dead: torch.Tensor | None = None) -> None:
    """Make a cache, or what `dead` marks of its first axes, NaN or as far from right as it gets.

    An integer has no NaN: the scales of dead tokens have it.
    """
    if cache.dtype in POISON_BYTES:
        cache, value = cache.view(torch.uint8), POISON_BYTES[cache.dtype]
    else:
        value = float("nan")
    if dead is None:
        cache.fill_(value)
    else:
        cache[dead] = value
