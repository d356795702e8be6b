"""Small decode problems and configs for the interpreter: both schedules and both products."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from running import run

from autoflash import gpu as gpus
from autoflash.accuracy import Budget
from autoflash.config import Config
from autoflash.inputs import Inputs, make_inputs
from autoflash.problem import Problem

H200 = gpus.known("NVIDIA_H200")
NAN = float("nan")


def config(schedule: str = "split", swap: int = 0, block_n: int = 32) -> Config:
    knobs = {
        "SCHEDULE": schedule,
        "SWAP": swap,
        "BLOCK_N": block_n,
        "num_warps": 4,
        "num_stages": 2,
        "PROGRAMS_PER_SM": 1,
        "DEPENDENT_LAUNCH": 0,
        "COMBINE_WARPS": 4,
    }
    return Config.of("decode", knobs)


every_config = pytest.mark.parametrize(
    "config",
    [config(schedule, swap) for schedule in ("split", "group") for swap in (0, 1)],
    ids=["split", "split-swapped", "group", "group-swapped"],
)
# whose last program merges
LAST = Config.of("decode_last", {k: v for k, v in config("group").knobs if k != "COMBINE_WARPS"})
each_choice = pytest.mark.parametrize(  # each schedule once, each product once
    "config", [config("split", 0), config("group", 1)], ids=["split", "group-swapped"]
)


def problem(
    batch: int,
    num_heads: int = 3,
    num_kv_heads: int = 1,
    head_dim: int = 16,
    seqlen_k: int = 100,
    seqlen_q: int = 1,
    dtype: str = "fp16",
    **fields: Any,
) -> Problem:
    return Problem(
        op="decode",
        dtype=dtype,
        batch=batch,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        **fields,
    )


def decode(
    inputs: Inputs, config: Config, splits: int = 2, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """`out` and `lse` with the keys cut in `splits`; for the group schedule, the whole batch's."""
    p = inputs.problem
    sequences = p.batch if config["SCHEDULE"] == "split" else 1
    gpu = replace(H200, num_sms=splits * p.num_kv_heads * sequences)
    return run(inputs, config, gpu=gpu, **options)


def same_bits(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def check(inputs: Inputs, config: Config, splits: int = 2, **options: float) -> None:
    verdict = Budget(inputs, **options).judge(*decode(inputs, config, splits, **options))
    assert verdict.correct, verdict.reason


def replace_block_n(config: Config, block_n: int) -> Config:
    return Config.of("decode", {**config.as_dict(), "BLOCK_N": block_n})


def gathered(paged: Inputs) -> Inputs:
    """The same sequences in a contiguous cache whose dead slots are NaN."""
    p = replace(paged.problem, page_size=0)
    k, v = (
        torch.full((p.batch, p.seqlen_k, p.num_kv_heads, p.head_dim), NAN, dtype=paged.k.dtype)
        for _ in range(2)
    )
    for b in range(p.batch):
        _, k_b, v_b = paged.sequence(b)
        k[b, : k_b.shape[1]] = k_b.transpose(0, 1)
        v[b, : v_b.shape[1]] = v_b.transpose(0, 1)
    return Inputs(p, paged.q, k, v, paged.cache_seqlens, None)


def step(
    lengths: list[int], num_heads: int = 4, num_kv_heads: int = 2, seed: int = 0, **fields: Any
) -> Inputs:
    return make_inputs(
        problem(len(lengths), num_heads, num_kv_heads, **fields), seed, lengths=lengths
    )


def counting(inputs: Inputs) -> Inputs:
    """With K = 0, `lse` is the logarithm of how many keys are seen; V = [1, j] tells which."""
    k, v = inputs.k * 0, inputs.v * 0
    v[..., 0], v[..., 1] = 1.0, torch.arange(v.shape[1], dtype=v.dtype)[:, None]
    return replace(inputs, k=k.nan_to_num(), v=v)


def expect_seen(inputs: Inputs, config: Config, seen: Any) -> None:
    """`seen(b, i, h)` are the keys that query token i of sequence b and head h sees."""
    out, lse = decode(counting(inputs), config, splits=3)
    p = inputs.problem
    for b in range(p.batch):
        for i in range(p.seqlen_q):
            for h in range(p.num_heads):
                keys = seen(b, i, h)
                assert round(float(lse[b, h, i].exp())) == len(keys)
                assert round(float(out[b, i, h, 1]) * len(keys)) == sum(keys)
