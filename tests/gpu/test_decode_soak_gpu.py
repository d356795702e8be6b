"""A few rounds of the soak of decode on a GPU; `make soak-decode` runs it for eight minutes."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "soak"))

import soak_decode

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("seed", range(4))
def test_rounds_find_nothing(seed: int) -> None:
    problem, config, complaints = soak_decode.soak_round(soak_decode.this_place(), seed)
    assert complaints == [], f"{problem}, {config}"
