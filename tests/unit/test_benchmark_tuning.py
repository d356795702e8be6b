"""The tuning benchmark without a GPU: what counts as a loss, who agrees, and what is written."""

import importlib
import json
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
from making import H200, candidates, decode_of, prefill_of, winner_of

from autoflash.busy import Shares

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PROBLEMS = {"prefill-a": prefill_of(), "decode-b": decode_of()}


@pytest.fixture
def tuning(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("tuning")


def decision(problem, place, tied=()):
    configs = candidates(problem)
    return winner_of(
        problem, configs[place], tied=tuple(configs[i] for i in tied), winner_us=100.0
    ).decision


def result(*decisions, seconds=60.0):
    return SimpleNamespace(
        decisions=decisions, seconds=seconds, trials=9, busy=Shares(0.91, 0.97), gpu=H200, db=None
    )


@pytest.fixture
def written(tuning, monkeypatch, tmp_path):
    """What the benchmark writes, by name."""
    kept = {}

    def write(name, cases, **more):
        kept[name] = json.loads(json.dumps({"cases": cases, **more}))
        return tmp_path / name

    monkeypatch.setattr(tuning, "write_results", write)
    return kept


def test_the_dozen_are_named_and_of_both_ops(tuning):
    assert len(tuning.PROBLEMS) == 12 == len(set(tuning.PROBLEMS.values()))
    assert {problem.op for problem in tuning.PROBLEMS.values()} == {"prefill", "decode"}


def test_luck_in_being_the_fastest_counts_for_nothing(tuning):
    """Twelve equal configs: the least of their medians is low, but not in the other rounds."""
    configs = candidates(prefill_of())[:12]
    losses = []
    for seed in range(40):
        random = Random(seed)
        samples = {c: [100 * random.gauss(1, 0.02) for _ in range(62)] for c in configs}
        losses.append(tuning.over_best(samples, configs[0]))
    assert sum(losses) / len(losses) == pytest.approx(1.0, abs=0.002)
    slower = {c: [100.0] * 8 for c in configs} | {configs[0]: [103.0] * 8}
    assert tuning.over_best(slower, configs[0]) == pytest.approx(1.03)


def test_searches_agree_on_one_winner_or_a_tie_either_way(tuning):
    one = decision(prefill_of(), 1, tied=[2])
    for place, tied, agree in ((1, [], True), (2, [], True), (3, [], False), (3, [1], True)):
        assert tuning.tied(one, decision(prefill_of(), place, tied)) == agree


def test_compare_writes_what_the_standard_search_loses(tuning, written, monkeypatch):
    found = {
        "standard": result(*(decision(p, 1) for p in PROBLEMS.values()), seconds=50.0),
        "exhaustive": result(*(decision(p, 2) for p in PROBLEMS.values()), seconds=200.0),
    }
    monkeypatch.setattr(tuning, "_tune", lambda problems, db, effort, *_: found[effort])

    def retimed(contenders, gpu, seed):
        assert gpu == H200
        times = {
            p: {c: [100.0] * 4 if c == candidates(p)[2] else [102.0] * 4 for c in configs}
            for p, configs in contenders.items()
        }
        assert all(candidates(p)[place] in times[p] for p in times for place in (1, 2))
        return times

    monkeypatch.setattr(tuning, "retimed", retimed)
    tuning.compare(PROBLEMS, 0, None)
    told = written["tuning"]
    assert told["seconds"] == {"standard": 50.0, "exhaustive": 200.0}
    assert (told["geomean_over_exhaustive"], told["worst_over_exhaustive"]) == (1.02, 1.02)
    assert told["gpu_busy"] == {"standard": 0.91, "exhaustive": 0.91}
    assert [case["over_best"] for case in told["cases"]] == [1.02, 1.02]
    found["standard"] = result(decision(prefill_of(), 1))
    with pytest.raises(SystemExit, match="no winner for decode-b"):
        tuning.compare(PROBLEMS, 0, None)


@pytest.mark.parametrize(("slower", "agree"), [(1.001, True), (1.02, False)])
def test_seeds_agree_where_their_winners_tie_beside_one_another(
    tuning, written, monkeypatch, slower, agree
):
    runs = iter(
        result(decision(PROBLEMS["prefill-a"], 1), decision(PROBLEMS["decode-b"], place))
        for place in (1, 1, 3)
    )

    def retimed(contenders, gpu, seed):
        ((problem, configs),) = contenders.items()  # of the other one all winners are the same
        assert configs == [candidates(problem)[1], candidates(problem)[3]]
        return {problem: {configs[0]: [100.0] * 8, configs[1]: [slower * 100.0] * 8}}

    monkeypatch.setattr(tuning, "_tune", lambda *_, **__: next(runs))
    monkeypatch.setattr(tuning, "retimed", retimed)
    tuning.seeds(PROBLEMS, 1)
    told = written["tuning_seeds"]
    assert told["agreeing"] == (1.0 if agree else 0.5) and told["seconds"] == [60.0] * 3
    cases = {case["case"]["name"]: case for case in told["cases"]}
    assert cases["prefill-a"]["agree"] and cases["prefill-a"]["retimed"] == []
    assert cases["decode-b"]["agree"] == agree and cases["decode-b"]["retimed"] == [slower]


def test_searches_side_by_side_have_a_gpu_and_cores_of_their_own(tuning, monkeypatch, tmp_path):
    cores, searched, kept = [], [], []

    def noted(*given, keep_kernels):
        searched.append(given[4:])
        kept.append(keep_kernels)

    monkeypatch.setattr("os.sched_getaffinity", lambda process: {4, 5, 6, 7, 8})
    monkeypatch.setattr("os.sched_setaffinity", lambda process, own: cores.append(set(own)))
    monkeypatch.setattr(tuning, "_tune", noted)
    for seed, gpu in ((0, 0), (1, 1), (2, 0)):
        tuning._tune_apart(PROBLEMS, tmp_path / "db", seed, gpu, 2)
    assert searched == [(0, 0), (1, 1), (2, 0)]
    assert kept == [True, True, False]  # the last one leaves nothing behind
    assert cores[0] == cores[2] and not cores[0] & cores[1]
    assert cores[0] | cores[1] == {4, 5, 6, 7, 8}
