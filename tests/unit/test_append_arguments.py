"""Arguments of append_kv(): what serves them, and one line that names what does not fit."""

import pytest
import torch

from autoflash.runtime.append import append_scale, append_switches
from autoflash.runtime.problem import ProblemError

INT8 = torch.int8


def call(**changes):
    """Three tokens of two heads for nine pages of 16."""
    call = {
        "k": torch.zeros(3, 2, 32, dtype=torch.bfloat16),
        "v": torch.zeros(3, 2, 32, dtype=torch.bfloat16),
        "k_cache": torch.zeros(9, 16, 2, 32, dtype=torch.bfloat16),
        "v_cache": torch.zeros(9, 16, 2, 32, dtype=torch.bfloat16),
        "slot_mapping": torch.tensor([0, -1, 143]),
        "kv_layout": "nhd",
        "k_scale": None,
        "v_scale": None,
    }
    return {**call, **changes}


def quantised(**changes):
    cache = torch.zeros(9, 16, 2, 32, dtype=INT8)
    return call(**{"k_cache": cache, "v_cache": cache, "k_scale": 0.5, "v_scale": 0.5, **changes})


def test_the_caches_and_their_scales_decide_the_text():
    assert append_switches(**call()) == ()
    assert append_switches(**quantised()) == ("quantised",)
    assert append_switches(**quantised(k_scale=torch.ones(2))) == ("quantised",)
    tokens = torch.ones(9, 16, 2)
    per_token = quantised(k_scale=tokens, v_scale=tokens)
    assert append_switches(**per_token) == ("quantised", "token_scales")
    hnd = torch.zeros(9, 2, 16, 32, dtype=torch.bfloat16)
    assert append_switches(**call(k_cache=hnd, v_cache=hnd, kv_layout="hnd")) == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": torch.zeros(1, 3, 2, 32).bfloat16()}, "k has 4 dimensions, not 3"),
        ({"k": torch.zeros(3, 2, 32).int()}, "k is torch.int32, not bf16, fp16 or fp32"),
        ({"v": torch.zeros(3, 1, 32).bfloat16()}, r"v is \(3, 1, 32\), expected \(3, 2, 32\)"),
        ({"v": torch.zeros(3, 2, 32)}, "v is torch.float32, expected torch.bfloat16"),
        ({"k_cache": torch.zeros(9, 16, 2, 32)}, "k_cache is torch.float32, expected torch.bf"),
        ({"v_cache": torch.zeros(9, 8, 2, 32).bfloat16()}, r"v_cache is \(9, 8, 2, 32\), expected"),
        ({"kv_layout": "hnd"}, "k_cache has 16 heads of 32, k has 2 of 32"),
        ({"kv_layout": "dnh"}, "kv_layout 'dnh' is none of nhd, hnd"),
        ({"slot_mapping": torch.zeros(4).long()}, r"slot_mapping is \(4,\), expected \(3,\)"),
        ({"slot_mapping": torch.zeros(3)}, "slot_mapping is torch.float32, not int32 or int64"),
        ({"k_scale": 0.5}, "k_scale is for a quantised cache"),
        ({"k": torch.zeros(3, 2, 64).bfloat16()[..., ::2]}, "k's last dimension must be contig"),
    ],
)
def test_an_argument_that_does_not_fit_is_named(changes, message):
    with pytest.raises(ProblemError, match=f"append_kv: {message}"):
        append_switches(**call(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"v_scale": None}, "a torch.int8 cache needs v_scale"),
        ({"k_scale": torch.ones(3, 2)}, r"k_scale is \(3, 2\); one number, \(2,\) or \(9, 16, 2\)"),
        ({"v_scale": torch.ones(9, 16, 2)}, "k_scale is per tensor and v_scale per token"),
    ],
)
def test_a_scale_that_does_not_fit_is_named(changes, message):
    with pytest.raises(ProblemError, match=message):
        append_switches(**quantised(**changes))


def test_plans_get_a_number_or_one_scale_for_each_head():
    assert append_scale(2, 3) == 2.0
    assert append_scale(torch.tensor([0.5]), 3).tolist() == [0.5, 0.5, 0.5]
    assert append_scale(torch.tensor([0.5, 1.0, 2.0]), 3).tolist() == [0.5, 1.0, 2.0]
    tokens = torch.rand(9, 16, 3)
    assert append_scale(tokens, 3) is tokens
