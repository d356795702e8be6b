"""The benchmark of numerics without a model: draws, and which tokens a dtype explains."""

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def numerics(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("numerics")


def streams(numerics, error):
    """Two sequences of three tokens, of which ours leaves the other's where the gap is 0.25."""
    logits = torch.tensor([1.0, 0.75, -2.0, -9.0], dtype=torch.float64).expand(2, 3, 4)
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    ours = tokens.clone()
    ours[1, 2] = 1
    exact = logits.clone()
    exact[:, 2, 3] += error
    return numerics.Streams(ours, tokens, logits, logits, exact)


def test_a_token_may_be_another_only_where_the_dtype_changes_logits_as_much(numerics):
    noise = numerics.ways(0)["greedy"]
    for dtype, error, told in (("bf16", 0.5, 0), ("bf16", 0.125, 1), ("fp32", 0.5, 1)):
        wrong = numerics.unexplained(dtype, streams(numerics, error), noise)
        assert len(wrong) == told, (dtype, error)
    assert wrong == ["sequence 1, token 2: gap 0.25, error 0.5"]
    same = replace(streams(numerics, 0.125), ours=streams(numerics, 0.125).theirs)
    assert numerics.unexplained("fp32", same, noise) == []


def test_the_gap_of_a_draw_is_that_of_what_was_compared(numerics):
    drawn = streams(numerics, 0.125)

    def apart(logits, step):
        return torch.tensor([0.0, 0.2, 0.0, 0.0], dtype=torch.float64).expand_as(logits)

    assert numerics.unexplained("bf16", drawn, apart) == []


def test_draws_are_of_the_softmax_and_the_same_for_all_who_ask(numerics):
    logits = torch.tensor([0.0, 1.0, 2.0, -3.0]).expand(20000, 4)
    noise = numerics.ways(7)["sampled"]
    assert torch.equal(noise(logits, 3), noise(logits, 3))
    assert not torch.equal(noise(logits, 3), noise(logits, 4))
    tokens = (logits + noise(logits, 3)).argmax(-1)
    shares = tokens.bincount(minlength=4) / len(tokens)
    expected = logits[0].softmax(-1)
    spread = (expected * (1 - expected) / len(tokens)).sqrt()
    assert ((shares - expected).abs() < 5 * spread).all()


def test_a_case_tells_both_errors_and_how_far_the_logits_are_apart(numerics):
    given = streams(numerics, 0.0)
    ours = given.our_logits + torch.tensor([2.0, 0.0, 0.0, 0.0])
    theirs = given.their_logits - torch.tensor([4.0, 0.0, 0.0, 0.0])
    told = numerics.case_of(
        "fp16",
        "greedy",
        replace(given, our_logits=ours, their_logits=theirs),
        numerics.ways(0)["greedy"],
    )
    assert (told["ours"], told["peers"], told["ratio"]) == (1.0, {"sdpa": 2.0}, 2.0)
    assert told["difference_quantiles"] == {"0.5": 0.0, "0.99": 6.0, "0.9999": 6.0, "1.0": 6.0}
    assert told["sequences_that_part"] == [{"sequence": 1, "token": 2}]
