"""Decode over some of a sequence's pages in the interpreter: their positions are those given."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from decoding import check, config, decode, each_choice, every_config, problem, same_bits

from autoflash.config import Config
from autoflash.inputs import POISON_PAGE, Inputs, make_inputs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:divide by zero encountered"),
]
ALL: dict[str, Any] = {"window_left": 60, "softcap": True, "alibi": True, "sinks": True}


def chosen(batch: int, lengths: list[int], poison: bool = True, **fields: Any) -> Inputs:
    p = problem(batch, 4, 2, pages="chosen", **{"page_size": 16, "seqlen_k": 112, **fields})
    return make_inputs(p, lengths=lengths, poison=poison)


@every_config
@pytest.mark.parametrize("seqlen_q", [1, 3])
@pytest.mark.parametrize("page_size", [1, 16, 48])
def test_some_pages_in_any_order_are_right(config: Config, seqlen_q: int, page_size: int) -> None:
    inputs = chosen(5, [200, 0, 33, 1, 97], seqlen_q=seqlen_q, page_size=page_size)
    check(inputs, config, splits=3)


@each_choice
@pytest.mark.parametrize("on", [{name: ALL[name]} for name in ALL] + [ALL], ids=str)
def test_modifiers_count_from_positions_in_the_whole_sequence(
    config: Config, on: dict[str, Any]
) -> None:
    for seqlen_q in (1, 3):
        check(chosen(3, [200, 1, 97], seqlen_q=seqlen_q, **on), config, splits=3)


def test_quantised_caches_merging_programs_and_latent_attention_are_right() -> None:
    for scales in ("head", "token"):
        fields = {"kv_dtype": "int8", "kv_scales": scales, "head_dim": 32}
        check(chosen(3, [200, 1, 97], seqlen_q=2, **fields), config())
    last = {k: v for k, v in config("group").knobs if k != "COMBINE_WARPS"}
    check(chosen(3, [200, 1, 97], **ALL), Config.of("decode_last", last), splits=3)
    latent = {"head_dim": 576, "head_dim_v": 512, "num_kv_heads": 1, "dtype": "bf16"}
    knobs = {k: v for k, v in config().knobs if k != "SWAP"} | {"BLOCK_M": 16}
    p = problem(2, **{"pages": "chosen", "page_size": 16, **latent})
    check(make_inputs(p, lengths=[200, 33]), Config.of("decode_latent", knobs))


@every_config
def test_all_pages_in_order_give_the_bits_of_a_plain_call(config: Config) -> None:
    plain = make_inputs(problem(3, 4, 2, page_size=16), lengths=[100, 97, 98])  # parts alike
    table = plain.block_table
    assert table is not None
    every = torch.arange(table.shape[1], dtype=torch.int32).expand(3, -1)
    p = replace(plain.problem, pages="chosen")
    assert same_bits(
        decode(replace(plain, problem=p, page_positions=every), config), decode(plain, config)
    )


@each_choice
def test_entries_of_no_page_may_hold_anything(config: Config) -> None:
    inputs = chosen(3, [200, 97, 1], alibi=True)
    positions, table = inputs.page_positions, inputs.block_table
    assert positions is not None and table is not None and inputs.cache_seqlens is not None
    expected = decode(inputs, config)
    none = positions < 0
    assert none.any() and (table[none] == POISON_PAGE).all()
    past = -(-inputs.cache_seqlens[:, None] // 16).expand_as(positions)
    for other in (
        torch.full_like(positions, -(2**31)),
        past,
        past * 0 + 2**27 - 1,
        past * 0 + 2**28,
    ):
        spoilt = positions.where(~none, other)
        assert same_bits(decode(replace(inputs, page_positions=spoilt), config), expected)
    wider = torch.nn.functional.pad(positions.long(), (1, 2), value=0)[:, 1:-2]
    assert same_bits(decode(replace(inputs, page_positions=wider), config), expected)


@each_choice
def test_the_last_page_need_not_be_read_and_none_leaves_nothing(config: Config) -> None:
    inputs = chosen(2, [200, 97], poison=False, sinks=True)
    positions = inputs.page_positions
    assert positions is not None
    last = torch.tensor([[12], [6]])
    check(replace(inputs, page_positions=positions.where(positions != last, -1)), config)
    none = replace(inputs, page_positions=torch.full_like(positions, -1))
    out, lse = decode(none, config)
    assert inputs.sinks is not None and (out == 0).all()
    torch.testing.assert_close(lse, inputs.sinks[None, :, None].expand_as(lse))
