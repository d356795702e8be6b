"""Decode of latent attention in the interpreter: keys of 576 channels, of which 512 are values."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from decoding import NAN, check, decode, same_bits

from autoflash.config import Config
from autoflash.inputs import POISON_PAGE, make_inputs
from autoflash.problem import Problem

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:divide by zero encountered"),
]


def config(schedule: str = "split", block_m: int = 16) -> Config:
    knobs = {
        "SCHEDULE": schedule,
        "BLOCK_M": block_m,
        "BLOCK_N": 32,
        "num_warps": 4,
        "num_stages": 2,
        "PROGRAMS_PER_SM": 1,
        "DEPENDENT_LAUNCH": 0,
        "COMBINE_WARPS": 4,
    }
    return Config.of("decode_latent", knobs)


def problem(batch: int, num_heads: int = 3, **fields: Any) -> Problem:
    shape: dict[str, Any] = {"head_dim": 576, "head_dim_v": 512, "seqlen_q": 1, "seqlen_k": 100}
    shape |= {"dtype": "bf16", "num_heads": num_heads, "num_kv_heads": 1}
    return Problem("decode", batch=batch, **(shape | fields))


each_schedule = pytest.mark.parametrize(
    "config", [config(), config("group")], ids=["split", "group"]
)


@each_schedule
@pytest.mark.parametrize("page_size", [0, 16])
def test_lengths_around_every_edge_of_tiles_and_pages_match_the_reference(
    config: Config, page_size: int
) -> None:
    for seqlen_q, splits in ((1, 1), (3, 3)):
        p = problem(6, seqlen_q=seqlen_q, page_size=page_size)
        check(make_inputs(p, lengths=[100, 0, 1, 32, 33, 65]), config, splits)


@pytest.mark.parametrize("block_m", [16, 64])
def test_more_rows_than_a_tile_holds_take_several_and_do_not_mix(block_m: int) -> None:
    inputs = make_inputs(problem(1, 20, seqlen_q=2, dtype="fp16"), lengths=[40])
    chosen = config(block_m=block_m)
    check(inputs, chosen)
    q = inputs.q.clone()
    q[:, 1, 17] += 1.0
    (out, _), (changed, _) = (decode(each, chosen) for each in (inputs, replace(inputs, q=q)))
    differs = (changed != out).any(dim=-1)  # (batch, query, head)
    assert differs[:, 1, 17].all() and differs.sum() == 1


def test_every_channel_of_a_key_counts_and_the_last_64_are_no_values() -> None:
    inputs = make_inputs(problem(1, seqlen_k=9, dtype="fp16"), poison=False)
    out, lse = decode(inputs, config())
    assert out.shape[-1] == 512
    for channel in (0, 511, 512, 575):
        k = inputs.k.clone()
        k[..., channel] += 1.0
        changed_out, changed_lse = decode(replace(inputs, k=k), config())
        assert (changed_lse != lse).all(), channel
        check(replace(inputs, k=k), config())
        if channel < 512:
            assert (changed_out[..., channel] != out[..., channel]).all()


@each_schedule
def test_dead_slots_and_table_entries_change_no_bit(config: Config) -> None:
    inputs = make_inputs(problem(3, seqlen_q=2, page_size=48), lengths=[100, 48, 2])
    assert inputs.block_table is not None
    plain = decode(inputs, config)
    table = inputs.block_table.where(inputs.block_table != POISON_PAGE, -1)
    zeroed = replace(inputs, k=inputs.k.nan_to_num())
    for other in (zeroed, replace(inputs, block_table=table)):
        assert same_bits(decode(other, config), plain)


def test_strides_of_wider_rows_and_of_outputs_are_kept_to() -> None:
    p = problem(2, seqlen_q=2, page_size=16, kv_layout="hnd")
    check(make_inputs(p, lengths=[60, 33], wide_rows=8), config())
    inputs = make_inputs(p, lengths=[60, 33])
    out = torch.full((3, 2, 2, 520), NAN, dtype=inputs.q.dtype).permute(1, 2, 0, 3)[..., :512]
    assert same_bits(decode(inputs, config(), out=out), decode(inputs, config()))


@each_schedule
def test_windows_and_modifiers_are_right(config: Config) -> None:
    on: dict[str, Any] = {"window_left": 40, "softcap": True, "alibi": True, "sinks": True}
    for name in on:
        p = problem(3, seqlen_q=2, page_size=16, **{name: on[name]})
        check(make_inputs(p, lengths=[100, 0, 64]), config, splits=3)
    check(make_inputs(problem(3, **on), lengths=[100, 0, 64]), config, splits=3)


def test_logits_far_from_zero_keep_their_weights() -> None:
    inputs = make_inputs(problem(1, seqlen_k=37), poison=False)
    for sign in (-1.0, 1.0):
        inputs.q[..., 575], inputs.k[..., 575] = 448.0, sign * 544.0
        check(inputs, config())
