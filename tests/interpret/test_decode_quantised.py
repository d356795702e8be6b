"""Quantised caches in the interpreter: every byte, every scale, judged by what they stand for."""

from dataclasses import replace

import pytest
import torch
from decoding import H200, NAN, check, config, decode, problem, replace_block_n, same_bits

from autoflash.config import Config
from autoflash.families.decode import FAMILY
from autoflash.inputs import KV_TORCH_DTYPES, POISON_PAGE, Inputs, make_inputs
from autoflash.predict import InterpretedDevice
from autoflash.problem import Problem

pytestmark = pytest.mark.slow

each_schedule = pytest.mark.parametrize(
    "config", [config("split"), config("group")], ids=["split", "group"]
)
each_type = pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "int8"])
each_scale = pytest.mark.parametrize("kv_scales", ["tensor", "head", "token"])


def quantised(batch: int, *heads: int, **fields) -> Problem:
    defaults = {"head_dim": 32, "dtype": "bf16", "kv_dtype": "fp8_e4m3", "kv_scales": "head"}
    return problem(batch, *heads, **(defaults | fields))


def spread(inputs: Inputs) -> Inputs:
    """The same with K and V in one tensor each of caches and of scales, and room between rows."""

    def side_by_side(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = torch.stack([k, v], dim=1)
        wide = torch.full((*both.shape[:-1], both.shape[-1] + 2), 0, dtype=both.dtype)
        wide[..., :-2] = both
        return wide[:, 0, ..., :-2], wide[:, 1, ..., :-2]

    k, v = side_by_side(inputs.k, inputs.v)
    k_scale, v_scale = inputs.k_scale, inputs.v_scale
    assert k_scale is not None and v_scale is not None
    if inputs.problem.kv_scales == "token":
        k_scale, v_scale = side_by_side(k_scale, v_scale)
    return replace(inputs, k=k, v=v, k_scale=k_scale, v_scale=v_scale)


@each_schedule
@each_type
@each_scale
@pytest.mark.parametrize(("dtype", "page_size"), [("bf16", 16), ("fp16", 0)])
def test_ragged_lengths_match_what_the_bytes_stand_for(
    config: Config, kv_dtype: str, kv_scales: str, dtype: str, page_size: int
) -> None:
    types = {"dtype": dtype, "kv_dtype": kv_dtype, "kv_scales": kv_scales}
    p = quantised(6, 4, 2, page_size=page_size, **types)
    check(make_inputs(p, lengths=[100, 1, 0, 31, 32, 65]), config)


@each_type
@pytest.mark.parametrize(("dtype", "place"), [("bf16", 0), ("fp16", 1)])
def test_every_byte_stands_for_its_number(kv_dtype: str, dtype: str, place: int) -> None:
    p = quantised(1, 256, 1, head_dim=256, seqlen_k=1, dtype=dtype, kv_dtype=kv_dtype)
    every = torch.arange(256, dtype=torch.uint8).roll(place)  # in either half of a word
    every = every.view(KV_TORCH_DTYPES[kv_dtype])
    values = every.float()
    known = values.isfinite()
    assert (~known).sum() == (2 if kv_dtype == "fp8_e4m3" else 0)
    k, v = torch.where(known, every.float(), 0.0).to(every.dtype), every
    channel_each = torch.eye(256, dtype=KV_TORCH_DTYPES[dtype]).view(1, 1, 256, 256)
    scales = torch.full((1, 1), 0.25), torch.full((1, 1), 0.5)
    caches = (k.view(1, 1, 1, 256), v.view(1, 1, 1, 256))
    inputs = Inputs(p, channel_each, *caches, torch.tensor([1]), None, *scales)
    out, lse = decode(inputs, config(), softmax_scale=1.0)
    # of one key, out is its value, and lse the score: of one channel for each query head
    assert torch.equal(out[0, 0, 0, known], (values[known] * 0.5).to(out.dtype))
    assert out[0, 0, 0, ~known].isnan().all()
    torch.testing.assert_close(lse[0, :, 0], k.float() * 0.25, rtol=2**-20, atol=2**-20)


@each_schedule
@each_scale
def test_dead_slots_scales_and_table_entries_change_no_bit(config: Config, kv_scales: str) -> None:
    p = quantised(3, seqlen_k=257, kv_scales=kv_scales, page_size=64)
    inputs = make_inputs(p, lengths=[257, 64, 1])
    assert inputs.block_table is not None
    dead = inputs.k.view(torch.uint8) == 0x7F
    assert dead.any()
    k, v = (
        torch.where(dead, 0, cache.view(torch.uint8)).view(cache.dtype)
        for cache in (inputs.k, inputs.v)
    )
    table = inputs.block_table.where(inputs.block_table != POISON_PAGE, -1)
    zeroed = replace(inputs, k=k, v=v, block_table=table)
    if kv_scales == "token":
        assert inputs.k_scale is not None and inputs.v_scale is not None
        k_scale, v_scale = inputs.k_scale.nan_to_num(), inputs.v_scale.nan_to_num()
        zeroed = replace(zeroed, k_scale=k_scale, v_scale=v_scale)
    config = replace_block_n(config, 128)
    assert same_bits(decode(zeroed, config), decode(inputs, config))


@each_scale
def test_a_number_and_a_tensor_of_it_give_the_same_bits(kv_scales: str) -> None:  # case S03
    inputs = make_inputs(quantised(2, 4, 2, kv_scales="tensor"), lengths=[100, 40])
    numbers = replace(inputs, k_scale=0.25, v_scale=0.5)
    shapes = {"tensor": (1, 1), "head": (1, 2), "token": inputs.k.shape[:-1]}
    shape = shapes[kv_scales] if kv_scales == "token" else (2, 2)
    tensors = replace(
        inputs,
        problem=replace(inputs.problem, kv_scales=kv_scales),
        k_scale=torch.full(shape, 0.25),
        v_scale=torch.full(shape, 0.5),
    )
    assert same_bits(decode(numbers, config()), decode(tensors, config()))
    twice = decode(replace(numbers, v_scale=1.0), config())
    assert torch.equal(twice[0], decode(numbers, config())[0] * 2)


@each_schedule
def test_each_sequence_and_head_has_the_scale_given_for_it(config: Config) -> None:  # case S03
    p = quantised(3, 4, 2, page_size=16)
    inputs = make_inputs(p, lengths=[100, 40, 33])
    scales = (torch.rand(3, 2) / 100 for _ in range(2))
    check(replace(inputs, **dict(zip(("k_scale", "v_scale"), scales, strict=True))), config)


@each_schedule
@pytest.mark.parametrize("kv_layout", ["nhd", "hnd"])
@pytest.mark.parametrize("kv_scales", ["head", "token"])
def test_layouts_and_strides_give_the_bits_of_the_plain_cache(
    config: Config, kv_layout: str, kv_scales: str
) -> None:
    p = quantised(3, 4, 2, kv_scales=kv_scales, kv_layout=kv_layout, page_size=16)
    inputs = make_inputs(p, lengths=[33, 100, 2])
    check(inputs, config, splits=3)
    plain = decode(inputs, config, splits=3)
    both = spread(inputs)
    for strided in (both, replace(inputs, v_scale=both.v_scale), replace(inputs, v=both.v)):
        assert same_bits(decode(strided, config, splits=3), plain)


@pytest.mark.parametrize("page_size", [1, 3, 48])
@pytest.mark.parametrize("kv_scales", ["head", "token"])
def test_any_page_size_gives_the_bits_of_the_contiguous_cache(
    page_size: int, kv_scales: str
) -> None:
    p = quantised(4, 4, 2, seqlen_k=200, kv_scales=kv_scales, page_size=page_size)
    paged = make_inputs(p, lengths=[1, 47, 49, 200], poison=False)
    assert paged.block_table is not None
    in_order = {
        name: getattr(paged, name)[paged.block_table.long()].flatten(1, 2)
        for name in ("k", "v", *(("k_scale", "v_scale") if kv_scales == "token" else ()))
    }
    contiguous = replace(paged, problem=replace(p, page_size=0), block_table=None, **in_order)
    assert same_bits(decode(paged, config()), decode(contiguous, config()))


@each_type
@pytest.mark.parametrize("head_dim", [16, 40, 80, 96, 256])
def test_any_head_dim_is_right_and_its_neighbours_are_not_read(
    head_dim: int, kv_dtype: str
) -> None:
    p = quantised(2, 2, 1, head_dim=head_dim, seqlen_k=40, kv_dtype=kv_dtype, page_size=16)
    check(make_inputs(p, lengths=[40, 33], wide_rows=True), config())
    tokens = replace(p, kv_scales="token")
    check(make_inputs(tokens, lengths=[40, 33], wide_rows=True), config("group"))


@each_schedule
@pytest.mark.parametrize("kv_scales", ["head", "token"])
def test_several_query_tokens_see_up_to_their_own_key(config: Config, kv_scales: str) -> None:
    p = quantised(5, 4, 2, seqlen_q=3, kv_scales=kv_scales, page_size=16)
    check(make_inputs(p, lengths=[100, 31, 33, 2, 64]), config)


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1e4, 1e30])
def test_queries_of_any_size_keep_their_scores(size: float) -> None:
    p = quantised(2, 4, 1, seqlen_q=2)
    inputs = make_inputs(p, lengths=[64, 33])
    factor = torch.tensor([1.0, size, 0.0, 1.0]).view(1, 1, 4, 1)  # rows of one tile
    inputs = replace(inputs, q=(inputs.q * factor).bfloat16())
    scale = 2.0**-3 / max(size, 1.0)
    check(inputs, config(), softmax_scale=scale)


@pytest.mark.parametrize("size", [1e-20, 1e-4, 1e4])
def test_values_of_any_size_keep_their_precision(size: float) -> None:
    p = quantised(2, 4, 1, kv_scales="token", seqlen_k=96)
    inputs = make_inputs(p, lengths=[96, 50])
    assert inputs.v_scale is not None
    check(replace(inputs, v_scale=inputs.v_scale * size), config())


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_small_value_keeps_its_weight_beside_large_ones(dtype: str) -> None:
    """fp16 has no room for the product of a probability and a scale of any size."""
    p = quantised(2, 4, 1, dtype=dtype, kv_scales="token", seqlen_k=96)
    inputs = make_inputs(p, lengths=[96, 50])
    assert inputs.v_scale is not None
    sizes = torch.logspace(-6, 2, 96).view(1, 96, 1)
    for scale in (None, 3.0):  # a softmax over many keys, and one that is nearly that of one key
        options = {} if scale is None else {"softmax_scale": scale}
        for order in (sizes, sizes.flip(1)):
            check(replace(inputs, v_scale=inputs.v_scale * order), config(), **options)


def test_a_value_whose_scale_is_zero_counts_in_the_softmax_and_nowhere_else() -> None:
    p = quantised(2, 4, 1, kv_scales="token", seqlen_k=96)
    inputs = make_inputs(p, lengths=[96, 50])
    assert inputs.v_scale is not None
    for dead in (slice(None), slice(0, 40), slice(10, 11)):
        v_scale = inputs.v_scale.clone()
        v_scale[:, dead] = 0.0
        scaled = replace(inputs, v_scale=v_scale)
        check(scaled, config())


def test_a_scale_that_is_no_number_shows() -> None:
    p = quantised(1, 4, 1, kv_scales="token", seqlen_k=64)
    for name in ("k_scale", "v_scale"):
        inputs = make_inputs(p)
        getattr(inputs, name)[0, 40] = NAN
        assert decode(inputs, config())[0].isnan().all()


@each_type
@each_scale
def test_the_tuners_own_check_passes(kv_dtype: str, kv_scales: str) -> None:
    p = quantised(2, 4, 2, kv_dtype=kv_dtype, kv_scales=kv_scales, page_size=16)
    device = InterpretedDevice(H200)
    assert device.check(p, FAMILY.default(p, H200), seed=0).correct
