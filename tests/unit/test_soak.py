"""The soak in short: a fault of every kind, a process of every kind killed."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "soak"))

from soak import FAULTS, Soak, run


def test_a_search_among_faults_and_kills_ends_as_a_clean_one(tmp_path):
    short = Soak("quick", "random", len(FAULTS), kills=3, pause_s=(0.2, 0.4), problems=2)
    assert run(short, tmp_path) == []
