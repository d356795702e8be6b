"""The soak of decode in short: a few rounds find nothing, and faults they find."""

import sys
from pathlib import Path

import pytest

from autoflash import check
from autoflash.runtime.load import load_text

sys.path.insert(0, str(Path(__file__).parents[1] / "soak"))

import soak_decode

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", range(6))
def test_rounds_find_nothing(seed: int) -> None:
    assert soak_decode.soak_round(soak_decode.this_place(), seed)[2] == []


@pytest.fixture
def planted(monkeypatch):
    """Plants a fault in every text that is loaded."""

    def plant(right: str, wrong: str) -> None:
        def faulty(name: str, text: str):
            return load_text(name, text.replace(right, wrong))

        monkeypatch.setattr("autoflash.kernel.load_text", faulty)

    check._module.cache_clear()
    yield plant
    check._module.cache_clear()


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("live = keys < seqlen_k", "live = keys < seqlen_k - 1"),
        ("l_i = l_i * alpha", "l_i = l_i"),
    ],
    ids=["the last key is dropped", "an old sum keeps its scale"],
)
def test_a_fault_is_found_within_a_few_rounds(planted, right: str, wrong: str) -> None:
    planted(right, wrong)
    place = soak_decode.this_place()
    assert any(soak_decode.soak_round(place, seed)[2] for seed in range(20))
