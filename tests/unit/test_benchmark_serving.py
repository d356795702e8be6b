"""The serving benchmark without a model: where tokens part, and how much slower is told."""

import importlib
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def serving(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("serving")


def test_a_sequence_that_differs_is_told_with_its_first_token_that_does(serving):
    theirs = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    ours = torch.tensor([[1, 2, 3], [4, 0, 0], [0, 8, 9]])
    assert serving.first_divergences(ours, theirs) == [(1, 1), (2, 0)]
    assert serving.first_divergences(theirs, theirs) == []


def test_rounds_are_paired_so_that_what_slows_both_does_not_count(serving):
    drift = [0.0, 100.0, 500.0, 50.0]
    ours = [10 + each + more for each, more in zip(drift, (1, -1, 1, -1), strict=True)]
    low, high = serving.slower_by({"autoflash": ours, "sdpa": drift})["sdpa"]
    assert low < 10 < high and high - low < 10
