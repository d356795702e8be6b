"""The portable backwards in the interpreter of packed sequences under masks beyond windows."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_backward import config, every_way, problem, single
from test_backward_masks import DOCUMENTS, HIDING, PREFIX, RULE, WINDOW
from test_backward_modifiers import SOME, assert_right, changed, packed, run, same_bits

from autoflash.accuracy import GradientBudget
from autoflash.config import Config
from autoflash.gradients import Gradients
from autoflash.inputs import Inputs, make_inputs

# numpy warns of exponentials of scores that the mask hides, and of what comes of them
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:overflow encountered in exp2"),
    pytest.mark.filterwarnings("ignore:invalid value encountered in"),
]

BF16 = {"dtype": "bf16"}
MASKS: dict[str, dict[str, Any]] = {
    "rule": {"mask": RULE},
    "prefix": PREFIX,
    "documents": DOCUMENTS,
}


@every_way
@pytest.mark.parametrize(
    "fields",
    [
        {"mask": RULE},
        {"mask": HIDING, "causal": False, "sinks": True, **BF16},
        {"mask": RULE, "window_left": 33, "softcap": True, "num_heads": 4, "num_kv_heads": 2},
        {"mask": HIDING, **WINDOW, "window_left": 60, "alibi": True},
        {**PREFIX, "sinks": True, "dropout": True},
        {**PREFIX, "density": 100, "softcap": True, **BF16},
        {**PREFIX, "mask": RULE, "alibi": True, "num_heads": 3},
    ],
    ids=[
        *("causal", "hides whole heads", "window, softcap", "window, alibi"),
        *("prefix, sinks, dropout", "all keys", "prefix, rule, alibi"),
    ],
)
def test_gradients_of_packed_sequences_are_right(fields: dict[str, Any], way: Config) -> None:
    """Sequences without queries, without keys, with fewer keys than queries; each knows its own."""
    inputs = packed(*SOME, **fields)
    assert_right(inputs, way)
    load_by = {"pointer": "descriptor", "descriptor": "pointer"}[str(way["LOAD"])]
    assert_right(inputs, Config.of(way.family, way.as_dict() | {"LOAD": load_by}))


@pytest.mark.parametrize("prefix", [0, 1, 32, 33, 63, 65, 2**31 - 1])
def test_a_packed_prefix_may_end_anywhere(prefix: int) -> None:
    made = packed((37, 50), (65, 97), (9, 3), num_heads=1, **PREFIX)
    inputs = changed(made, prefix_lens=torch.tensor([7, prefix, prefix], dtype=torch.int32))
    for way in (config(), single()):
        assert_right(inputs, way)


@every_way
@pytest.mark.parametrize(
    "mask",
    [{"mask": RULE}, {**PREFIX, "mask": HIDING}, DOCUMENTS, {**DOCUMENTS, "window_left": 33}],
    ids=["rule", "both", "documents", "documents in a window"],
)
def test_a_packed_sequence_has_the_gradients_of_a_batch(mask: dict[str, Any], way: Config) -> None:
    """Of the same lengths: to the bit, as positions, rows and sequences are what they are there."""
    whole = make_inputs(problem(40, 70, batch=3, **mask), wide_rows=8)
    tokens = {n: getattr(whole, n).flatten(0, 1) for n in ("q", "k", "v", "out", "dout")}
    tokens |= {n: getattr(whole, n).transpose(0, 1).flatten(1) for n in ("lse", "dlse")}
    ends = {n: (torch.arange(4) * s).int() for n, s in (("q", 40), ("k", 70))}
    starts = {f"cu_seqlens_{n}": each for n, each in ends.items()}
    same = replace(whole, problem=replace(whole.problem, layout="thd"), **tokens, **starts)
    expected, found = run(whole, way)[0], run(same, way)[0]
    if way.family == "backward":
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other.flatten(0, 1))
    assert GradientBudget(same).judge(found).correct


def noise_around_the_second(inputs: Inputs) -> Inputs:
    """The same with no numbers in the first and the third sequence."""
    ends_q, ends_k, noise = inputs.cu_seqlens_q, inputs.cu_seqlens_k, {}
    assert ends_q is not None and ends_k is not None
    for name in ("q", "out", "dout", "k", "v"):
        ends = ends_k if name in "kv" else ends_q
        noise[name] = getattr(inputs, name).clone()
        noise[name][: ends[1]] = noise[name][ends[2] :] = float("nan")
    return replace(inputs, **noise)


@every_way
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_what_one_packed_sequence_holds_changes_no_bit_of_another(
    mask: dict[str, Any], way: Config
) -> None:
    inputs = packed((37, 37), (20, 70), (9, 33), **mask)
    expected, found = run(inputs, way)[0], run(noise_around_the_second(inputs), way)[0]
    for name, one, other in zip(Gradients._fields, found, expected, strict=True):
        ends = inputs.cu_seqlens_q if name == "dq" else inputs.cu_seqlens_k
        assert ends is not None
        own = slice(int(ends[1]), int(ends[2]))
        assert torch.equal(one[own], other[own]) and (one[own] != 0).any(), name


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_a_packed_mask_is_felt(mask: dict[str, Any]) -> None:
    """What is found right are not the gradients without it."""
    lengths = ((37, 37), (20, 70))
    plain, masked = packed(*lengths), packed(*lengths, **mask)
    for way in (config(), single()):
        assert not GradientBudget(plain).judge(run(masked, way)[0]).correct
        if way.family == "backward":
            assert same_bits(run(masked, way), run(masked, way))
