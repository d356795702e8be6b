"""Self-test: the module's own kernels on small tensors, against attention written out in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

SELF_TEST_RATIO = 2.0  # of the error that the same sums make in fp32 with P rounded


class SelfTestError(RuntimeError):
    """Results of this module are wrong on this machine; says of which cases."""


class SelfTestCase(NamedTuple):
    """`error` is the largest of a row, over the row's RMS; `allowed` what it may be."""

    name: str
    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed  # a NaN does not


def run_self_test(
    prefill: Callable[..., Any],
    decode: Callable[..., Any],
    append_kv: Callable[..., Any],
    device: torch.device | str,
) -> list[SelfTestCase]:
    """Every function once or more on small bf16 tensors. Raises SelfTestError."""
    made = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=made).to(device, torch.bfloat16)

    cases = []
    for causal, window, tokens, keys in (
        (True, (-1, -1), 40, 40),
        (False, (-1, -1), 33, 70),
        (True, (-1, -1), 40, 33),  # the first queries see no key
        (True, (20, 0), 40, 70),
    ):
        q, k, v = normal(1, tokens, 4, 64), normal(1, keys, 2, 64), normal(1, keys, 2, 64)
        out = prefill(q, k, v, causal=causal, window=window)
        name = f"prefill causal={causal} window={window} {tokens} queries {keys} keys"
        cases.append(_judged(name, out, q, k, v, causal, window[0]))
    pages = torch.randperm(12, generator=made).to(device, torch.int32).view(2, 6)
    lengths = torch.tensor([90, 17], device=device, dtype=torch.int32)
    k, v, q = normal(2, 96, 2, 64), normal(2, 96, 2, 64), normal(2, 3, 4, 64)
    caches = [torch.full((12, 16, 2, 64), float("nan"), device=device).to(q.dtype) for _ in "kv"]
    places = torch.arange(96, device=device)
    slots = (pages[:, places // 16] * 16 + places % 16).long()
    slots = slots.where(places[None] < lengths[:, None], -1)
    append_kv(k.flatten(0, 1), v.flatten(0, 1), *caches, slots.flatten())
    chunk, told = normal(2, 20, 4, 64), {"cache_seqlens": lengths, "block_table": pages}
    for name, queries, out in (
        ("append_kv and paged decode", q, decode(q, *caches, **told)),
        ("append_kv and prefill over pages", chunk, prefill(chunk, *caches, causal=True, **told)),
    ):
        for row, length in enumerate(lengths.tolist()):
            own = slice(row, row + 1)
            given = (queries[own], k[own, :length], v[own, :length])
            cases.append(_judged(f"{name}, {length} keys", out[own], *given, True, -1))
    wrong = [case for case in cases if not case.passed]
    if wrong:
        told = "; ".join(f"{each.name}: off by {each.error:.3g} row RMS" for each in wrong)
        raise SelfTestError(f"wrong results on {device}: {told}")
    return cases


def _judged(
    name: str,
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    left: int,
) -> SelfTestCase:
    exact = _attention_in(torch.float64, q, k, v, causal, left)
    rounded = _attention_in(torch.float32, q, k, v, causal, left).to(q.dtype)
    rms = exact.pow(2).mean(dim=-1, keepdim=True).sqrt()
    rms = rms.masked_fill(rms == 0, torch.finfo(torch.float64).tiny)  # such a row must be zero
    unit = torch.finfo(q.dtype).eps / 2 * exact.abs().amax(dim=-1, keepdim=True) / rms
    error = ((out.double() - exact).abs() / rms - unit).max()
    allowed = SELF_TEST_RATIO * ((rounded.double() - exact).abs() / rms).max()
    return SelfTestCase(name, error.item(), allowed.item())


def _attention_in(
    dtype: torch.dtype,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    left: int,
) -> torch.Tensor:
    """Attention of (batch, tokens, heads, head_dim); in fp32 P is rounded to the queries' type."""
    group_size = q.shape[2] // k.shape[2]
    wide = [each.to(dtype).transpose(1, 2) for each in (q, k, v)]
    queries, keys, values = wide[0], *(w.repeat_interleave(group_size, 1) for w in wide[1:])
    scores = queries @ keys.transpose(2, 3) * q.shape[3] ** -0.5
    places = torch.arange(q.shape[1], device=q.device)[:, None] + k.shape[1] - q.shape[1]
    after = torch.arange(k.shape[1], device=q.device)[None] - places
    hidden = (after > 0) & causal
    if left >= 0:
        hidden = hidden | (after < -left)
    scores = scores.masked_fill(hidden, float("-inf"))
    largest = scores.amax(dim=-1, keepdim=True).nan_to_num(neginf=0.0)
    p = (scores - largest).exp()
    total = p.sum(dim=-1, keepdim=True)
    if dtype == torch.float32:
        p = p.to(q.dtype).float()
    out = p @ values / total.where(total > 0, 1.0)
    return out.transpose(1, 2)
