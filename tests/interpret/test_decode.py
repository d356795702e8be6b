"""Decode in the interpreter: the contract at small shapes, for both schedules and both products."""

import math
from dataclasses import replace

import pytest
import torch
from decoding import (
    NAN,
    check,
    config,
    decode,
    each_choice,
    every_config,
    gathered,
    problem,
    replace_block_n,
    same_bits,
)

from autoflash.accuracy import Budget
from autoflash.config import Config
from autoflash.inputs import POISON_PAGE, Inputs, make_inputs


@every_config
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_ragged_pages_match_the_reference(config: Config, dtype: str) -> None:
    p = problem(5, dtype=dtype, page_size=16)
    check(make_inputs(p, lengths=[100, 1, 0, 37, 64]), config)


@each_choice
@pytest.mark.parametrize("kv_layout", ["nhd", "hnd"])
@pytest.mark.parametrize("page_size", [0, 16])
def test_both_cache_layouts_match_the_reference(
    config: Config, kv_layout: str, page_size: int
) -> None:
    p = problem(3, 4, 2, kv_layout=kv_layout, page_size=page_size)
    check(make_inputs(p, lengths=[33, 100, 2]), config, splits=3)


@each_choice
@pytest.mark.parametrize("fill", [NAN, float("inf")])
@pytest.mark.parametrize("page_size", [0, 64])
def test_dead_slots_change_no_bit(config: Config, fill: float, page_size: int) -> None:  # case B04
    p = problem(4, 2, 2, seqlen_k=128, page_size=page_size)
    poisoned = make_inputs(p, lengths=[32, 64, 96, 48])
    clean, filled = (
        replace(
            poisoned,
            k=poisoned.k.nan_to_num(nan=value, posinf=value),
            v=poisoned.v.nan_to_num(nan=value, posinf=value),
        )
        for value in (0.0, fill)
    )
    assert same_bits(decode(clean, config), decode(filled, config))


@every_config
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_dead_table_entries_change_no_bit(  # case B13
    config: Config, index_dtype: torch.dtype
) -> None:
    p = problem(3, seqlen_k=257, page_size=64)
    inputs = make_inputs(p, lengths=[257, 64, 1])
    assert inputs.block_table is not None and inputs.block_table.shape == (3, 5)
    dead_page = torch.full_like(inputs.k[:1], NAN)
    inputs = replace(inputs, k=torch.cat([inputs.k, dead_page]), v=torch.cat([inputs.v, dead_page]))
    results = [
        decode(replace(inputs, block_table=table.to(index_dtype)), replace_block_n(config, 128))
        for table in (
            inputs.block_table,
            inputs.block_table.where(inputs.block_table != POISON_PAGE, -1),
            inputs.block_table.where(inputs.block_table != POISON_PAGE, len(inputs.k) - 1),
        )
    ]
    assert same_bits(results[0], results[1]) and same_bits(results[0], results[2])
    check(inputs, config)


@every_config
@pytest.mark.parametrize("page_size", [0, 16])
def test_a_sequence_without_keys_is_zero_and_its_lse_minus_infinity(  # case B06
    config: Config, page_size: int
) -> None:
    p = problem(3, head_dim=64, page_size=page_size)
    inputs = make_inputs(p, lengths=[1, 0, 3])
    out, lse = decode(inputs, config)
    assert (out[1] == 0).all() and (lse[1] == float("-inf")).all()
    check(inputs, config)


@pytest.mark.parametrize("splits", [1, 2, 7, 8, 16, 32])
@each_choice
def test_any_number_of_splits_is_right_with_fewer_tiles_than_splits(  # case B19
    config: Config, splits: int
) -> None:
    p = problem(7, 2, seqlen_k=520, page_size=16)
    inputs = make_inputs(p, lengths=[0, 1, 2, 5, 64, 65, 520])
    check(inputs, replace_block_n(config, 16), splits)


def test_more_parts_than_are_merged_at_once_are_scaled_to_one_maximum() -> None:
    p = problem(1, head_dim=256, seqlen_k=16 * 40, dtype="bf16")
    check(make_inputs(p, scale=1.5), config(block_n=16), splits=40)


@each_choice
def test_out_is_the_same_without_lse(config: Config) -> None:
    inputs = make_inputs(problem(2, page_size=16), lengths=[100, 40])
    with_lse, _ = decode(inputs, config)
    without, lse = decode(inputs, config, with_lse=False)
    assert lse is None and torch.equal(with_lse, without)


@each_choice
@pytest.mark.parametrize("heads", [(28, 4), (6, 1), (15, 5), (9, 3), (71, 1)])
def test_any_group_size_is_right_and_heads_do_not_mix(  # case B23
    config: Config, heads: tuple[int, int]
) -> None:
    p = problem(2, *heads, seqlen_k=150, page_size=16)
    inputs = make_inputs(p, lengths=[17, 150])
    config = replace_block_n(config, 128)
    result = decode(inputs, config)
    verdict = Budget(inputs).judge(*result)
    assert verdict.correct, verdict.reason

    changed = inputs.q.clone()
    changed[:, :, 2] += 1.0
    out, lse = decode(replace(inputs, q=changed), config)
    others = torch.arange(p.num_heads) != 2
    assert torch.equal(out[:, :, others], result[0][:, :, others])
    assert torch.equal(lse[:, others], result[1][:, others])
    assert not torch.equal(lse[:, 2], result[1][:, 2])


@each_choice
def test_a_group_too_wide_for_one_tile_takes_several(config: Config) -> None:
    p = problem(2, 40, 1, head_dim=256, page_size=16)  # 32 rows of 256 channels fit
    check(make_inputs(p, lengths=[100, 33]), config, splits=4)


@pytest.mark.parametrize(("schedule", "block_n"), [("split", 16), ("split", 64), ("group", 16)])
@pytest.mark.parametrize("page_size", [1, 3, 16, 48, 480])
def test_any_page_size_gives_the_bits_of_the_contiguous_cache(  # case B24
    page_size: int, block_n: int, schedule: str
) -> None:
    lengths = [1, 47, 48, 49, 96, 500]
    p = problem(6, 4, 2, seqlen_k=500, page_size=page_size)
    paged = make_inputs(p, lengths=lengths)
    contiguous = gathered(paged)
    chosen = config(schedule, block_n=block_n)
    result = decode(paged, chosen)
    assert same_bits(result, decode(contiguous, chosen))
    verdict = Budget(contiguous).judge(*result)
    assert verdict.correct, verdict.reason


@each_choice
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("place", [0, 1, 3], ids=["first", "after the pages", "after the heads"])
def test_k_and_v_of_one_tensor_are_read_where_they_are(  # case B25
    config: Config, place: int, page_size: int
) -> None:
    """(2, pages, ...), (pages, 2, ...) or (..., heads, 2, head_dim): K and V by strides alone."""
    inputs = make_inputs(problem(2, 4, 2, seqlen_k=60, page_size=page_size), lengths=[60, 21])
    both = torch.stack([inputs.k, inputs.v], dim=place)
    k, v = both.unbind(place)
    assert k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    assert same_bits(decode(replace(inputs, k=k, v=v), config), decode(inputs, config))


@each_choice
def test_k_and_v_of_different_strides_give_the_bits_of_equal_ones(  # case B25
    config: Config,
) -> None:
    inputs = make_inputs(problem(2, 4, 2, seqlen_k=60, page_size=16), lengths=[60, 21])
    plain = decode(inputs, config)
    heads_first = inputs.v.transpose(1, 2).contiguous().transpose(1, 2)  # hnd, seen as nhd
    tokens_outermost = inputs.k.transpose(0, 1).contiguous().transpose(0, 1)
    for strided in (replace(inputs, v=heads_first), replace(inputs, k=tokens_outermost)):
        assert same_bits(decode(strided, config), plain)


@every_config
@pytest.mark.parametrize("lengths_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("table_dtype", [torch.int32, torch.int64])
def test_lengths_and_tables_of_either_type_and_any_strides_give_the_same_bits(  # case B25
    config: Config, table_dtype: torch.dtype, lengths_dtype: torch.dtype
) -> None:
    inputs = make_inputs(problem(2, 4, 2, seqlen_k=60, page_size=16), lengths=[60, 21])
    assert inputs.block_table is not None and inputs.cache_seqlens is not None
    wide_table = torch.full((2, 9), POISON_PAGE, dtype=table_dtype)
    wide_table[:, 3:7] = inputs.block_table
    spread = torch.full((2, 3), 2**30, dtype=lengths_dtype)
    spread[:, 1] = inputs.cache_seqlens
    strided = replace(inputs, block_table=wide_table[:, 3:7], cache_seqlens=spread[:, 1])
    assert same_bits(decode(strided, config), decode(inputs, config))


@each_choice
def test_strided_queries_and_outputs_give_the_bits_of_contiguous_ones(config: Config) -> None:
    p = problem(3, seqlen_k=62)
    inputs = make_inputs(p, lengths=[62, 30, 5])
    plain = decode(inputs, config)
    heads_outermost = inputs.q.transpose(0, 2).contiguous().transpose(0, 2)
    shifted = torch.full((inputs.q.numel() + 1,), NAN, dtype=inputs.q.dtype)[1:]
    shifted = shifted.view_as(inputs.q).copy_(inputs.q)
    out = torch.full((3, 3, 1, 24), NAN, dtype=inputs.q.dtype).permute(1, 2, 0, 3)[..., :16]
    for q in (heads_outermost, shifted):
        assert same_bits(decode(replace(inputs, q=q), config), plain)
    assert same_bits(decode(inputs, config, out=out), plain)


@each_choice
def test_page_ids_whose_offset_passes_32_bits_are_read_where_they_are(  # case B05
    config: Config,
) -> None:
    p = problem(1, 8, 8, head_dim=128, seqlen_k=40, page_size=16)
    near = make_inputs(p, poison=False)
    assert near.block_table is not None
    near = replace(near, v=near.k)
    far = torch.empty(131_080, 16, 8, 128, dtype=near.k.dtype)  # 4.3 GB, of which 3 pages are used
    ids = torch.tensor([[131_072, 3, 131_079]], dtype=torch.int32)
    far[ids.long()] = near.k[near.block_table.long()]
    result = decode(replace(near, k=far, v=far, block_table=ids), config)
    assert same_bits(result, decode(near, config))


@each_choice
def test_one_cache_expanded_over_the_batch_is_read_where_it_is(config: Config) -> None:
    p = problem(3, seqlen_k=62)
    inputs = make_inputs(p, lengths=[62, 62, 62])
    k, v = (t[:1].expand_as(t) for t in (inputs.k, inputs.v))
    expanded = decode(replace(inputs, k=k, v=v), config)
    copied = decode(replace(inputs, k=k.contiguous(), v=v.contiguous()), config)
    assert same_bits(expanded, copied)


@each_choice
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_scores_far_from_zero_keep_their_softmax(config: Config, sign: float) -> None:  # case B38
    p = problem(2, 8, 1, head_dim=128, seqlen_k=37, dtype="bf16", page_size=16)
    inputs = make_inputs(p, lengths=[37, 36], poison=False)
    inputs.q[..., 0], inputs.k[..., 0] = 448.0, 544.0 * sign
    check(inputs, config)


@each_choice
def test_scores_beyond_the_range_of_fp16_are_summed_in_fp32(config: Config) -> None:  # case B38
    p = problem(1, 4, 1, head_dim=128, seqlen_k=37)
    inputs = make_inputs(p, poison=False)
    inputs.q.add_(200.0), inputs.k.add_(200.0)
    check(inputs, config)


@each_choice
def test_sums_over_many_tiles_stay_in_fp32(config: Config) -> None:
    p = problem(1, 1, seqlen_k=1600, dtype="bf16")
    inputs = make_inputs(p)
    inputs.k.zero_(), inputs.v.abs_()  # so that sums grow with every tile
    check(inputs, replace_block_n(config, 16), splits=1)


@each_choice
@pytest.mark.parametrize("head_dim", [16, 40, 72, 80, 96, 160, 192, 256])
def test_any_head_dim_is_right_and_its_neighbours_are_not_read(  # case B40
    config: Config, head_dim: int
) -> None:
    p = problem(2, 2, 1, head_dim, seqlen_k=40, page_size=16)
    check(make_inputs(p, lengths=[40, 33], wide_rows=True), config)
    contiguous = replace(p, page_size=0)
    check(make_inputs(contiguous, lengths=[40, 33], wide_rows=True), config, splits=1)


@each_choice
@pytest.mark.parametrize(("page_size", "splits"), [(0, 8), (16, 1), (16, 8)])
def test_zero_keys_make_lse_the_log_of_their_number(  # case B50
    config: Config, page_size: int, splits: int
) -> None:
    p = problem(4, head_dim=16, seqlen_k=300, dtype="fp32", page_size=page_size)
    lengths = [300, 1, 77, 128]
    inputs = make_inputs(p, lengths=lengths)
    inputs.k.mul_(0.0)
    _, lse = decode(inputs, config, splits)
    assert lse.dtype == torch.float32
    expected = torch.tensor([math.log(n) for n in lengths])[:, None, None].expand_as(lse)
    torch.testing.assert_close(lse, expected, rtol=2**-20, atol=2**-20)


@each_choice
def test_two_halves_merged_by_lse_are_the_whole(config: Config) -> None:  # case B50
    p = problem(1, seqlen_k=90, dtype="fp32")
    inputs = make_inputs(p)
    parts = [
        decode(
            Inputs(
                replace(p, seqlen_k=last - first),
                inputs.q,
                inputs.k[:, first:last],
                inputs.v[:, first:last],
                torch.tensor([last - first]),
            ),
            config,
        )
        for first, last in ((0, 60), (60, 90))
    ]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    out = sum(o * (s - lse).exp().transpose(1, 2)[..., None] for o, s in parts)
    verdict = Budget(inputs).judge(out, lse)
    assert verdict.correct, verdict.reason


@pytest.mark.parametrize("swap", [0, 1])
def test_a_sequence_alone_has_the_bits_it_has_in_a_batch(swap: int) -> None:
    p = problem(4, page_size=16)
    inputs = make_inputs(p, lengths=[100, 7, 0, 65])
    assert inputs.block_table is not None and inputs.cache_seqlens is not None
    out, lse = decode(inputs, config(swap=swap), splits=3)
    for b in range(4):
        alone = Inputs(
            replace(p, batch=1),
            inputs.q[b : b + 1],
            inputs.k,
            inputs.v,
            inputs.cache_seqlens[b : b + 1],
            inputs.block_table[b : b + 1],
        )
        result = decode(alone, config(swap=swap), splits=3)
        assert same_bits(result, (out[b : b + 1], lse[b : b + 1]))


@each_choice
def test_the_order_of_pages_in_the_cache_changes_no_bit(config: Config) -> None:
    inputs = make_inputs(problem(3, page_size=16), lengths=[100, 50, 16])
    assert inputs.block_table is not None
    reversed_table = len(inputs.k) - 1 - inputs.block_table
    table = reversed_table.where(inputs.block_table != POISON_PAGE, -1)
    reversed_ = replace(inputs, k=inputs.k.flip(0), v=inputs.v.flip(0), block_table=table)
    assert same_bits(decode(inputs, config), decode(reversed_, config))


@each_choice
def test_lengths_beyond_the_stated_maximum_are_right(config: Config) -> None:
    p = problem(2, seqlen_k=16, page_size=16)
    check(make_inputs(p, lengths=[100, 70]), config)


@pytest.mark.parametrize("batch", [8, 9])
@pytest.mark.parametrize("shares", [1, 3, 64])
def test_the_group_schedule_shares_tiles_of_any_batch(batch: int, shares: int) -> None:
    p = problem(batch, 1, page_size=16)
    lengths = [100, 0, 0, 33, 1, 64, 0, 17, 90][:batch]
    check(make_inputs(p, lengths=lengths), config("group"), shares)


@each_choice
def test_the_softmax_scale_is_the_one_given(config: Config) -> None:
    p = problem(2, page_size=16)
    check(make_inputs(p, lengths=[100, 40]), config, softmax_scale=0.5)
