"""Several query tokens a sequence in the interpreter: causal among themselves, no row mixed up."""

import math
from dataclasses import replace

import pytest
import torch
from decoding import (
    NAN,
    check,
    decode,
    each_choice,
    every_config,
    gathered,
    problem,
    replace_block_n,
    same_bits,
)

from autoflash.config import Config
from autoflash.inputs import POISON_PAGE, make_inputs

pytestmark = pytest.mark.slow


@every_config
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("seqlen_q", [2, 3, 16])
def test_lengths_around_every_edge_of_tiles_and_pages_match_the_reference(
    config: Config, page_size: int, seqlen_q: int
) -> None:
    p = problem(8, seqlen_q=seqlen_q, page_size=page_size)
    # tiles of 32: the queries of a sequence see up to both sides of an edge
    check(make_inputs(p, lengths=[100, 31, 32, 33, 34, 48, 64, 65]), config)


@every_config
def test_queries_before_the_first_key_are_zero_and_their_lse_minus_infinity(
    config: Config,
) -> None:
    p = problem(5, seqlen_q=4, page_size=16)
    inputs = make_inputs(p, lengths=[0, 1, 3, 4, 100])
    out, lse = decode(inputs, config)
    for b, keys in enumerate([0, 1, 3, 4]):
        blind = 4 - keys
        assert (out[b, :blind] == 0).all() and (out[b, blind:] != 0).any(dim=-1).all()
        assert (lse[b, :, :blind] == float("-inf")).all() and lse[b, :, blind:].isfinite().all()
    check(inputs, config)


@each_choice
@pytest.mark.parametrize("splits", [1, 8])
def test_zero_keys_make_lse_the_log_of_how_many_each_query_sees(
    config: Config, splits: int
) -> None:
    p = problem(3, seqlen_q=5, seqlen_k=300, dtype="fp32", page_size=16)
    lengths = [300, 2, 97]
    inputs = make_inputs(p, lengths=lengths)
    inputs.k.mul_(0.0)
    _, lse = decode(inputs, config, splits)
    seen = [[n - 5 + i + 1 for i in range(5)] for n in lengths]
    logs = [[math.log(n) if n > 0 else float("-inf") for n in row] for row in seen]
    expected = torch.tensor(logs)[:, None].expand_as(lse)
    torch.testing.assert_close(lse, expected, rtol=2**-20, atol=2**-20)


@each_choice
@pytest.mark.parametrize("heads", [(28, 4), (6, 1), (9, 3), (71, 1)])
def test_any_group_size_is_right_and_rows_do_not_mix(
    config: Config, heads: tuple[int, int]
) -> None:
    p = problem(2, *heads, seqlen_k=150, seqlen_q=3, page_size=16)
    inputs = make_inputs(p, lengths=[17, 150])
    check(inputs, config)
    out, lse = decode(inputs, config)
    changed = inputs.q.clone()
    changed[:, 1, 2] += 1.0
    changed_out, changed_lse = decode(replace(inputs, q=changed), config)
    differs = (changed_out != out).any(dim=-1)  # (batch, query, head)
    assert differs[:, 1, 2].all() and differs.sum() == 2
    assert ((changed_lse != lse).transpose(1, 2) == differs).all()


@each_choice
def test_more_rows_than_a_tile_holds_take_several(config: Config) -> None:
    p = problem(2, 16, 2, head_dim=256, seqlen_q=5, page_size=16)  # 40 rows, of which 32 fit
    check(make_inputs(p, lengths=[100, 33]), config, splits=4)


@each_choice
def test_a_key_changes_no_bit_of_the_queries_before_it(config: Config) -> None:
    p = problem(2, seqlen_q=4)
    inputs = make_inputs(p, lengths=[33, 66])
    assert inputs.cache_seqlens is not None
    out, lse = decode(inputs, config)
    k, v = inputs.k.clone(), inputs.v.clone()
    for b, keys in enumerate(inputs.cache_seqlens.tolist()):
        k[b, keys - 2] += 1.0  # of the last query but one
        v[b, keys - 2] += 1.0
    changed_out, changed_lse = decode(replace(inputs, k=k, v=v), config)
    assert torch.equal(changed_out[:, :2], out[:, :2])
    assert torch.equal(changed_lse[..., :2], lse[..., :2])
    assert (changed_out[:, 2:] != out[:, 2:]).any(dim=-1).all()


@each_choice
@pytest.mark.parametrize("page_size", [1, 3, 48])
def test_any_page_size_gives_the_bits_of_the_contiguous_cache(
    config: Config, page_size: int
) -> None:
    p = problem(4, 4, 2, seqlen_k=200, seqlen_q=2, page_size=page_size)
    paged = make_inputs(p, lengths=[1, 47, 49, 200])
    assert same_bits(decode(paged, config), decode(gathered(paged), config))


@each_choice
def test_dead_slots_and_table_entries_change_no_bit(config: Config) -> None:
    p = problem(3, seqlen_k=257, seqlen_q=4, page_size=64)
    inputs = make_inputs(p, lengths=[257, 64, 2])
    assert inputs.block_table is not None
    config = replace_block_n(config, 128)  # tiles that reach over a page's end
    zeroed = replace(inputs, k=inputs.k.nan_to_num(), v=inputs.v.nan_to_num())
    table = inputs.block_table.where(inputs.block_table != POISON_PAGE, -1)
    for other in (zeroed, replace(inputs, block_table=table)):
        assert same_bits(decode(other, config), decode(inputs, config))


@each_choice
def test_strided_queries_and_outputs_give_the_bits_of_contiguous_ones(config: Config) -> None:
    p = problem(3, 4, 2, seqlen_k=62, seqlen_q=3)
    inputs = make_inputs(p, lengths=[62, 30, 5])
    plain = decode(inputs, config)
    heads_outermost = inputs.q.transpose(0, 2).contiguous().transpose(0, 2)
    assert same_bits(decode(replace(inputs, q=heads_outermost), config), plain)
    out = torch.full((4, 3, 3, 24), NAN, dtype=inputs.q.dtype).permute(1, 2, 0, 3)[..., :16]
    assert same_bits(decode(inputs, config, out=out), plain)


@each_choice
def test_out_is_the_same_without_lse(config: Config) -> None:
    inputs = make_inputs(problem(2, seqlen_q=4, page_size=16), lengths=[100, 40])
    with_lse, _ = decode(inputs, config)
    without, lse = decode(inputs, config, with_lse=False)
    assert lse is None and torch.equal(with_lse, without)
