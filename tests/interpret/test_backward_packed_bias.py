"""The gradient of a bias of packed sequences in the interpreter, and the others' beside it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_backward import config, every_way, problem, single
from test_backward_masks import PREFIX, RULE, WINDOW
from test_backward_modifiers import SOME, assert_right, changed, packed, run
from test_backward_packed_masks import noise_around_the_second

from autoflash.accuracy import GradientBudget
from autoflash.config import Config
from autoflash.inputs import Inputs, make_inputs

NAN, INF = float("nan"), float("inf")

# numpy warns of exponentials of scores that the mask hides, and of what comes of them
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:overflow encountered in exp2"),
    pytest.mark.filterwarnings("ignore:invalid value encountered in"),
]


def biased(*lengths: tuple[int, int], **fields: Any) -> Inputs:
    """Packed sequences with a bias of each head of each, NaN where one has no query or no key."""
    made = packed(*lengths, bias=True, **fields)
    p = made.problem
    shape = (p.batch, p.num_heads, p.seqlen_q, p.seqlen_k)
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(made.q.dtype)
    for b, (rows, keys) in enumerate(lengths):
        bias[b, :, rows:] = bias[b, :, :, keys:] = NAN
    return changed(made, bias=bias)


@every_way
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"causal": False, "sinks": True, "dtype": "bf16", "num_heads": 4, "num_kv_heads": 2},
        {"window_left": 33, "softcap": True, "dropout": True},
        {**WINDOW, "window_left": 20, "mask": RULE},
        {**PREFIX, "num_heads": 3},
    ],
    ids=["causal", "full, sinks", "window, softcap, dropout", "window, rule", "prefix"],
)
def test_gradients_are_right_and_places_past_the_ends_have_none(
    fields: dict[str, Any], way: Config
) -> None:
    """Sequences without queries, without keys, with fewer keys than queries."""
    inputs = biased(*SOME, **fields)
    _, beside = assert_right(inputs, way)
    assert beside.dbias is not None
    for b, (rows, keys) in enumerate(SOME):
        assert (beside.dbias[b, :, rows:] == 0).all() and (beside.dbias[b, :, :, keys:] == 0).all()
    load_by = {"pointer": "descriptor", "descriptor": "pointer"}[str(way["LOAD"])]
    assert_right(inputs, Config.of(way.family, way.as_dict() | {"LOAD": load_by}))


# batch, heads, queries and keys of the longest sequences, those that are shared 1 or left out
SHARED = [(6, 2, 70, 100), (1, 2, 70, 100), (6, 1, 70, 1), (1, 1, 1, 100), (2, 1, 1), (70, 100), ()]


@pytest.mark.parametrize("shape", SHARED, ids=str)
def test_what_shares_a_number_is_summed(shape: tuple[int, ...]) -> None:
    made = packed(*SOME, bias=True)
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(made.q.dtype)
    inputs = changed(made, bias=bias)
    for way in (config(), single()) if shape == SHARED[1] else (config(),):
        _, beside = assert_right(inputs, way)
        assert beside.dbias is not None
        assert beside.dbias.shape == (1,) * (4 - len(shape)) + shape


def test_a_bias_of_the_longest_sequences_said_may_be_larger_than_all() -> None:
    """What no sequence reaches has no gradient, and is not read."""
    made = packed((20, 37), (9, 5), bias=True)
    longer = replace(made.problem, seqlen_q=150, seqlen_k=170)
    bias = torch.full((1, 2, 150, 170), NAN, dtype=made.q.dtype)
    bias[:, :, :20, :37] = 0.5
    inputs = changed(replace(made, problem=longer), bias=bias)
    for way in (config(), single()):
        _, beside = assert_right(inputs, way)
        assert beside.dbias is not None and (beside.dbias[:, :, :20, :37] != 0).any()
        assert (beside.dbias[:, :, 20:] == 0).all() and (beside.dbias[..., 37:] == 0).all()


def test_what_one_packed_sequence_holds_changes_no_bit_of_anothers_bias() -> None:
    """Nor do tiles of queries past its end, where the next one's statistics lie."""
    inputs = biased((37, 37), (20, 70), (150, 33))
    assert inputs.bias is not None
    noise = noise_around_the_second(inputs)
    bias = inputs.bias.clone()
    bias[0] = bias[2] = NAN
    for way in (config(), single()):
        expected, found = run(inputs, way), run(replace(noise, bias=bias), way)
        for one, other, span in zip(
            found[0], expected[0], (slice(37, 57), *[slice(37, 107)] * 2), strict=True
        ):
            assert torch.equal(one[span], other[span])
        assert found[1].dbias is not None and expected[1].dbias is not None
        assert torch.equal(found[1].dbias[1], expected[1].dbias[1])
        assert (expected[1].dbias[1] != 0).any()


def test_packed_sequences_have_the_gradients_of_a_batch() -> None:
    """Of the same lengths: to the bit, as positions, rows and sequences are what they are there."""
    whole = make_inputs(problem(40, 70, batch=3, bias=True), wide_rows=8)
    tokens = {n: getattr(whole, n).flatten(0, 1) for n in ("q", "k", "v", "out", "dout")}
    tokens |= {n: getattr(whole, n).transpose(0, 1).flatten(1) for n in ("lse", "dlse")}
    ends = {n: (torch.arange(4) * s).int() for n, s in (("q", 40), ("k", 70))}
    starts = {f"cu_seqlens_{n}": each for n, each in ends.items()}
    same = replace(whole, problem=replace(whole.problem, layout="thd"), **tokens, **starts)
    expected, found = run(whole, config()), run(same, config())
    for one, other in zip(found[0], expected[0], strict=True):
        assert torch.equal(one, other.flatten(0, 1))
    assert found[1].dbias is not None and expected[1].dbias is not None
    assert torch.equal(found[1].dbias, expected[1].dbias)


def test_minus_infinity_hides_keys_and_whole_rows() -> None:
    made = biased((37, 37), (20, 70), causal=False)
    assert made.bias is not None
    bias = made.bias.clone()
    bias[1, :, 5], bias[0, :, :37, 30:37] = -INF, -INF
    inputs = changed(made, bias=bias)
    for way in (config(), single()):
        gradients, beside = assert_right(inputs, way)
        assert beside.dbias is not None and (beside.dbias[1, :, 5] == 0).all()
        assert (gradients.dq[42] == 0).all() and (gradients.dk[30:37] == 0).all()


def test_a_bias_is_felt() -> None:
    """What is found right are not the gradients without it, nor under another."""
    plain, inputs = packed((37, 37), (20, 70)), packed((37, 37), (20, 70), bias=True)
    assert inputs.bias is not None
    other = changed(inputs, bias=inputs.bias.flip(3))
    for way in (config(), single()):
        found = run(inputs, way)
        assert not GradientBudget(plain).judge(found[0]).correct
        assert not GradientBudget(other).judge(*found).correct
