"""Dropout on the host: Philox as published, one mask for each place of each call, and its mean."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from autoflash.dropout import dropout_numbers, philox, philox_pair
from autoflash.gpu import known
from autoflash.inputs import make_inputs
from autoflash.problem import Problem, ProblemError
from autoflash.reference import reference
from autoflash.runtime.backward_hopper_validity import backward_hopper_unsupported
from autoflash.runtime.dropping import whole_probability
from autoflash.runtime.hopper_validity import prefill_hopper_unsupported

H200 = known("NVIDIA_H200")
FEW, MANY = torch.arange(2), torch.arange(64)


def problem(**changed: Any) -> Problem:
    fields: dict[str, Any] = {"dtype": "bf16", "batch": 1, "num_heads": 2, "num_kv_heads": 1}
    fields |= {"head_dim": 64, "seqlen_q": 16, "seqlen_k": 24, "causal": False, "dropout": True}
    return Problem(**{"op": "prefill", **fields, **changed})


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000",
         "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
         "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
         "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
    ids=["zeros", "ones", "pi"],
)  # fmt: skip
def test_philox_gives_the_published_answers(counter: str, key: str, words: str) -> None:
    """Those of Random123, the authors' own code."""
    counters, keys = ([torch.tensor(int(w, 16)) for w in text.split()] for text in (counter, key))
    found = philox((counters[0], counters[1], counters[2], counters[3]), (keys[0], keys[1]))
    assert " ".join(f"{int(word):08x}" for word in found) == words


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ("00000000 00000000", "00000000", "ff1dae59 6cd10df2"),
        ("ffffffff ffffffff", "ffffffff", "2c3f628b ab4fd7ad"),
        ("243f6a88 85a308d3", "13198a2e", "dd7ce038 f62a4c12"),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_of_two_words_gives_the_published_answers(
    counter: str, key: str, words: str
) -> None:
    first, second = (torch.tensor(int(word, 16)) for word in counter.split())
    found = philox_pair((first, second), torch.tensor(int(key, 16)))
    assert " ".join(f"{int(word):08x}" for word in found) == words


def numbers(seed: int = 5, offset: int = 0, b: int = 0, heads: torch.Tensor = FEW) -> torch.Tensor:
    return dropout_numbers(torch.tensor([seed, offset]), b, heads, MANY, MANY)


def test_numbers_are_even_over_all_that_16_bits_hold() -> None:
    drawn = numbers(heads=torch.arange(16)).double()
    assert drawn.min() >= 0 and drawn.max() < 65536
    # each mean of 2**16 numbers lies within 5 of its standard deviations
    share = (drawn < 0.3 * 65536).double().mean()
    assert abs(share - 0.3) < 5 * (0.3 * 0.7 / drawn.numel()) ** 0.5
    assert abs(drawn.mean() / 65536 - 0.5) < 5 * (1 / 12 / drawn.numel()) ** 0.5
    for axis in (1, 2):  # nor do neighbours have anything in common
        one, other = drawn[:, :-1, :-1], drawn.roll(-1, axis)[:, :-1, :-1]
        both = torch.corrcoef(torch.stack((one.flatten(), other.flatten())))[0, 1]
        assert abs(both) < 5 / one.numel() ** 0.5


OTHERS = {
    "seed": numbers(seed=6),
    "seed's upper half": numbers(seed=5 + 2**32),
    "offset": numbers(offset=1),
    "offset's upper half": numbers(offset=2**32),
    "negative offset": numbers(offset=-1),
    "sequence": numbers(b=1),
    "head": numbers().flip(0),
    "query": numbers().roll(1, 1),
    "eight queries": numbers().roll(8, 1),
    "sixteen queries": numbers().roll(16, 1),
    "key": numbers().roll(1, 2),
    "eight keys": numbers().roll(8, 2),
    "sixteen keys": numbers().roll(16, 2),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_other_numbers_are_drawn_for_another(other: torch.Tensor) -> None:
    assert (numbers() == other).double().mean() < 0.002


def test_a_number_depends_on_nothing_but_its_own_place() -> None:
    rows, columns = torch.tensor([3, 61, 17]), torch.tensor([40, 2])
    rng = torch.tensor([5, 0])
    some = dropout_numbers(rng, 0, torch.tensor([1]), rows, columns)
    assert torch.equal(some[0], numbers()[1][rows][:, columns])


def test_over_seeds_the_mean_is_the_result_without_dropout_and_lse_is_its_own() -> None:
    inputs = make_inputs(problem(seqlen_q=8, head_dim=16, head_dim_v=16))
    without = replace(inputs.problem, dropout=False)
    plain, lse = reference(replace(inputs, problem=without, dropout_p=0.0, rng=None))
    drawn = []
    for seed in range(64):
        out, own_lse = reference(replace(inputs, rng=torch.tensor([seed, 7])))
        assert torch.equal(own_lse, lse)
        drawn.append(out)
    every = torch.stack(drawn)
    error = (every.mean(dim=0) - plain) / (every.std(dim=0) / len(drawn) ** 0.5)
    # in standard deviations of a mean: of 256 the one furthest off, and all together
    assert error.abs().max() < 5 and error.pow(2).mean() < 1.5


@pytest.mark.parametrize(
    ("given", "kept"),
    [(0.0, 0.0), (0.5, 0.5), (0.1, 6554 / 65536), (1e-9, 0.0), (1 - 1e-9, 65535 / 65536)],
)
def test_a_probability_is_a_whole_number_of_65536ths_below_1(given: float, kept: float) -> None:
    assert whole_probability(given) == kept


def test_what_does_not_serve_dropout_says_so() -> None:
    for changed in ({"op": "decode", "seqlen_q": 1}, {"page_size": 16}):
        with pytest.raises(ProblemError, match="there is none in decode, nor over pages"):
            problem(**changed)
    assert prefill_hopper_unsupported(problem(), H200) == "dropout: the portable family's"
    backward = problem(op="backward")
    assert backward_hopper_unsupported(backward, H200) == "dropout: the portable family's"
