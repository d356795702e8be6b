"""A bias of packed sequences in the interpreter: by query and key of the own sequence."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from running import run
from test_prefill import LOADS, config
from test_prefill_packed import RAGGED, assert_right, packed

from autoflash.inputs import Inputs

NAN, INF = float("nan"), float("inf")

# numpy warns of the -inf that the lse of a row without a visible key is
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:divide by zero encountered in log2"),
]


def biased(**changed: Any) -> Inputs:
    """Packed sequences with a bias of each head of each, NaN where one has no query or no key."""
    inputs = packed(bias=True, **changed)
    p = inputs.problem
    shape = (p.batch, p.num_heads, p.seqlen_q, p.seqlen_k)
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(inputs.q.dtype)
    for b, (rows, keys) in enumerate(RAGGED):
        bias[b, :, rows:] = bias[b, :, :, keys:] = NAN
    return replace(inputs, bias=bias)


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(
    "on", [{"causal": True}, {"causal": False, "sinks": True}, {"window_left": 20, "softcap": True}]
)
def test_a_bias_of_packed_sequences_is_right_under_any_mask(on: dict, load: str) -> None:
    assert_right(biased(**on), config(LOAD=load))


def test_a_bias_that_all_share_is_right_in_other_types_and_broadcasts() -> None:
    assert_right(packed(bias=True, dtype="fp32", num_heads=1), config(BLOCK_M=16))
    inputs = packed(bias=True, dtype="bf16", num_heads=4, num_kv_heads=2)
    for shape in ((), (4, 1, 1), (65, 1), (1, 130)):
        bias = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
        assert_right(replace(inputs, bias=bias), config(BLOCK_M=128))


def test_with_equal_keys_lse_is_that_of_the_biases_a_query_sees() -> None:
    inputs = biased(dtype="fp32", causal=True)
    _, lse = run(replace(inputs, k=inputs.k * 0), config())
    assert lse is not None and inputs.bias is not None
    row = 0
    for b, (rows, keys) in enumerate(RAGGED):
        for i in range(rows):
            seen = max(0, i + 1 + keys - rows)
            expected = inputs.bias[b, :, i, :seen].logsumexp(dim=1)
            torch.testing.assert_close(lse[:, row + i], expected, rtol=2**-20, atol=2**-19)
        row += rows


@pytest.mark.parametrize("causal", [True, False])
def test_minus_infinity_hides_keys_and_whole_rows(causal: bool) -> None:
    inputs = biased(causal=causal)
    assert inputs.bias is not None
    bias = inputs.bias.clone()
    bias[1, :, 5] = bias[6, 1] = bias[6, 0, :, 10:90] = -INF
    hidden = replace(inputs, bias=bias)
    assert_right(hidden, config())
    out, lse = run(hidden, config())
    assert lse is not None and (lse[:, 5] == -math.inf).all() and (out[5] == 0).all()
    assert (lse[1, 135:166] == -math.inf).all() and (out[135:166, 1] == 0).all()
