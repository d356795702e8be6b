"""The benchmark of the lazy Hopper family without a GPU: who is timed, and what is told."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest
from making import H200

from autoflash.families import why_refused
from autoflash.store import shipped_winners
from autoflash.turns import Times
from autoflash.workload import load_workload

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def lazy(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("lazy")


def winners_of(lazy):
    problems = {problem for problem, _ in load_workload(lazy.WORKLOAD).problems}
    return [
        (each.decision.problem, each.decision.winner)
        for each in shipped_winners()
        if each.decision.problem in problems and each.decision.winner.family == lazy.PLAIN
    ]


def test_every_winner_stands_beside_the_lazy_family_with_its_knobs(lazy):
    winners = winners_of(lazy)
    assert len(winners) > 30
    turned = 0
    for problem, winner in winners:
        configs = lazy.configs_of(problem, winner, H200)
        assert configs.pop("plain") == winner
        assert {config.family for config in configs.values()} <= {lazy.LAZY}
        assert all(why_refused(problem, each, H200) is None for each in configs.values())
        if "lazy" in configs:
            assert configs["lazy"].knobs == winner.knobs
        turned += len(configs) > 1
    assert turned > 20


def test_ours_is_the_faster_family_and_the_ratio_is_of_the_faster_peer(lazy):
    problem, _ = winners_of(lazy)[0]
    us = {"plain": 110.0, "lazy": 100.0, "cudnn": 130.0, "flash_attention_3": 120.0}
    times = {name: Times("graph", [each] * 3) for name, each in us.items()}
    result = lazy.result_of(problem, H200, times, {"lazy, other turns": "it spills"})
    assert (result["ours"], result["ratio"], result["lazy_over_plain"]) == (100.0, 1.2, 1.1)
    assert set(result["peers"]) == {"cudnn", "flash_attention_3"}
    alone = lazy.result_of(problem, H200, {"plain": times["plain"]}, {})
    assert alone["lazy_over_plain"] is None and alone["ratio"] is None
    assert lazy.summary_of([result, alone]) == {"ratio": 1.2, "lazy_over_plain": 1.1}
