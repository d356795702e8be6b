"""Scales of quantised caches as callers give them: told apart by shape, refused by name."""

import pytest
import torch

from autoflash.runtime.arguments import decode_problem
from autoflash.runtime.problem import ProblemError
from autoflash.runtime.scales import scale_form

FP8 = torch.float8_e4m3fn


def call(**changes):
    """A call of three sequences over nine pages of 16 tokens and two heads."""
    call = {
        "q": torch.zeros(3, 1, 4, 32, dtype=torch.bfloat16),
        "k_cache": torch.zeros(9, 16, 2, 32, dtype=FP8),
        "v_cache": torch.zeros(9, 16, 2, 32, dtype=FP8),
        "cache_seqlens": torch.tensor([1, 2, 40], dtype=torch.int32),
        "block_table": torch.zeros(3, 3, dtype=torch.int32),
        "kv_layout": "nhd",
        "max_seqlen_k": None,
        "lengths": "ragged",
        "pages": "permuted",
        "k_scale": 0.25,
        "v_scale": 0.5,
    }
    return {**call, **changes}


@pytest.mark.parametrize(
    ("k_scale", "v_scale", "kv_scales"),
    [
        (0.25, 2, "tensor"),
        (torch.ones(1), torch.tensor(0.5), "tensor"),
        (torch.ones(2), 0.5, "head"),
        (torch.ones(1), torch.ones(3, 2), "head"),
        (torch.ones(9, 16, 2), torch.ones(9, 16, 2), "token"),
    ],
)
def test_what_a_scale_is_for_is_read_from_its_shape(k_scale, v_scale, kv_scales):
    problem = decode_problem(**call(k_scale=k_scale, v_scale=v_scale))
    assert (problem.kv_dtype, problem.kv_scales) == ("fp8_e4m3", kv_scales)


def test_scales_of_tokens_follow_the_order_of_the_caches_axes():
    cache = torch.zeros(9, 2, 16, 32, dtype=torch.int8)
    scale = torch.ones(9, 2, 16)
    given = {"k_cache": cache, "v_cache": cache, "k_scale": scale, "v_scale": scale}
    problem = decode_problem(**call(kv_layout="hnd", **given))
    assert (problem.kv_dtype, problem.kv_scales) == ("int8", "token")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k_scale": None}, "a torch.float8_e4m3fn cache needs k_scale; 1.0 if there is none"),
        ({"v_scale": None}, "cache needs v_scale"),
        ({"v_scale": 0.0}, "v_scale 0.0 is not positive"),
        ({"k_scale": float("nan")}, "k_scale nan is not positive"),
        ({"k_scale": torch.ones(2, dtype=torch.bfloat16)}, "k_scale is torch.bfloat16, not fp32"),
        ({"k_scale": torch.ones(3)}, r"k_scale is \(3,\); one number, \(2,\), \(3, 2\)"),
        ({"k_scale": torch.ones(2, 2)}, r"k_scale is \(2, 2\)"),
        ({"v_scale": torch.ones(9, 2, 16)}, r"v_scale is \(9, 2, 16\).* or \(9, 16, 2\)"),
        ({"k_scale": torch.ones(9, 16, 2)}, "k_scale is per token and v_scale per tensor"),
        ({"v_cache": torch.zeros(9, 16, 2, 32, dtype=torch.int8)}, "v_cache is torch.int8"),
        ({"k_scale": torch.ones(2, device="meta")}, "k_scale is on meta, the cache on cpu"),
        ({"q": torch.zeros(3, 1, 4, 32, dtype=FP8)}, "q is torch.float8_e4m3fn, not bf16"),
    ],
)
def test_a_scale_that_does_not_fit_is_named(changes, message):
    with pytest.raises(ProblemError, match=message):
        decode_problem(**call(**changes))


def test_a_scale_of_a_cache_that_is_not_quantised_is_refused_and_not_ignored():
    plain = {name: torch.zeros(9, 16, 2, 32).bfloat16() for name in ("k_cache", "v_cache")}
    assert decode_problem(**call(**plain, k_scale=None, v_scale=None)).kv_scales == "none"
    for name in ("k_scale", "v_scale"):
        scales = {"k_scale": None, "v_scale": None, name: 1.0}
        with pytest.raises(ProblemError, match=f"{name} is for a quantised cache"):
            decode_problem(**call(**plain, **scales))


def test_rows_of_bytes_that_begin_at_odd_places_are_refused():
    for odd in (torch.zeros(9, 16, 2, 33, dtype=FP8)[..., :32], wide_from_one()):
        with pytest.raises(ProblemError, match="v_cache has rows that begin at odd bytes"):
            decode_problem(**call(v_cache=odd))


def wide_from_one():
    return torch.zeros(9, 16, 2, 34, dtype=FP8)[..., 1:33]


def test_plans_get_a_number_or_one_scale_for_each_sequence_and_head():
    assert scale_form(2, "tensor", 3, 2) == 2.0
    for given in (torch.tensor(0.5), torch.tensor([[0.5]])):
        assert torch.equal(scale_form(given, "tensor", 3, 2), torch.full((3, 2), 0.5))
    heads = torch.tensor([0.5, 0.25])
    assert torch.equal(scale_form(heads, "head", 3, 2), heads.expand(3, 2))
    each = torch.rand(3, 2)
    assert scale_form(each, "head", 3, 2).data_ptr() == each.data_ptr()
    tokens = torch.rand(9, 16, 2)
    assert scale_form(tokens, "token", 3, 2) is tokens
