"""Comparing decisions: of two GPUs, two versions of triton, two runs."""

import json
from dataclasses import replace

import pytest
from store_samples import A100, OLDER, PROBLEM, TOOLCHAIN, config, decision, run, winner
from typer.testing import CliRunner

from autoflash.cli import app
from autoflash.errors import StoreError
from autoflash.store import Store, dump_winners

OTHER = replace(PROBLEM, batch=64)


@pytest.fixture
def db(tmp_path, monkeypatch):
    """Two runs on an H200, one with an older triton, and one run on an A100."""
    monkeypatch.setattr("autoflash.store.store.tunedb_dir", lambda: tmp_path / "tunedb")
    path = tmp_path / "compared.db"
    with Store.open(path) as store:
        first, second = run(store), run(store)
        store.record_decision(first, decision(us=9.0))
        store.record_decision(first, decision(us=10.0))  # the latest of a run counts
        store.record_decision(first, decision(OTHER, us=100.0))
        store.record_decision(second, decision(us=8.0, place=1))
        store.record_decision(second, decision(OTHER, us=100.0))
        store.record_decision(second, decision(us=1.0, source="predicted"))
        store.record_decision(run(store, toolchain=OLDER), decision(us=16.0))
        store.record_decision(run(store, A100), decision(OTHER, us=300.0))
    return path


def ask(*args):
    return CliRunner().invoke(app, ["query", "--diff", *map(str, args)])


def rows(*args):
    result = ask(*args, "--json")
    assert result.exit_code == 0, result.exception
    return json.loads(result.stdout)


def refusal(*args):
    result = ask(*args)
    assert isinstance(result.exception, StoreError) and result.stdout == ""
    return str(result.exception)


def test_two_runs_the_largest_change_first(db):
    changed, same = rows("run", "--db", db, "--between", "1,2")
    assert (changed["first_us"], changed["second_us"], changed["ratio"]) == (10.0, 8.0, 0.8)
    assert (changed["same_config"], same["same_config"]) == (0, 1)
    assert changed["second_knobs_json"] == config(1).as_dict()
    assert (same["batch"], same["ratio"]) == (64, 1.0)
    (back, _) = rows("run", "--db", db, "--between", "2,1")
    assert back["ratio"] == 1.25


def test_two_versions_of_triton_on_one_gpu_type(db):
    result = ask("triton", "--db", db, "--json")
    (row,) = json.loads(result.stdout)
    assert (row["first"], row["second"], row["ratio"]) == ("3.5.1", "3.6.0", 0.5)
    # the A100's problem too is of one version alone
    assert result.stderr == "notice: 2 problems are of triton 3.6.0 alone\n"


def test_two_gpus_by_words_of_their_names(db):
    (row,) = rows("gpu", "--db", db, "--between", "H200,A100")
    assert (row["first_us"], row["second_us"], row["batch"]) == (100.0, 300.0, 64)
    assert row["second"] == "NVIDIA A100-SXM4-80GB"
    (row,) = rows("gpu", "--db", db)
    assert row["first"] == "NVIDIA A100-SXM4-80GB"  # by name where nobody says otherwise


def test_shipped_winners_take_part_beside_the_users(db, tmp_path):
    newer = replace(TOOLCHAIN, triton="3.7.0")
    shipped = [winner(us=5.0, toolchain=newer), winner(us=99.0)]
    dump_winners(shipped, tmp_path / "tunedb" / "winners")
    (row,) = rows("triton", "--db", db, "--between", "3.6.0,3.7.0")
    assert (row["first_us"], row["second_us"]) == (8.0, 5.0)


def test_filters_leave_rows_out(db):
    assert [row["batch"] for row in rows("run", "--db", db, "--between", "1,2", "--batch", 1)] == [
        1
    ]
    assert "there are: none" in refusal("run", "--db", db, "--between", "1,2", "--op", "prefill")


def test_a_table_is_for_people(db):
    header, first, *_ = ask("run", "--db", db, "--between", "1,2").stdout.splitlines()
    own = ["same_config", "first_knobs_json", "second_knobs_json", "problem"]
    assert header.split()[-4:] == own
    assert " 0.8 " in first


WRONG = {
    "three": (["run"], "--diff run: say which two with --between A,B; there are: 1, 2, 3, 4"),
    "one name": (["run", "--between", "1"], "--between 1: two are compared, given as A,B"),
    "twice": (["run", "--between", "1,1"], "--between 1,1: both are 1"),
    "unknown": (
        ["run", "--between", "1,9"],
        "--between: no run is called 9; there are: 1, 2, 3, 4",
    ),
    "several": (
        ["gpu", "--between", "NVIDIA,A100"],
        "--between: more than one gpu is called NVIDIA; "
        "there are: NVIDIA A100-SXM4-80GB, NVIDIA H200",
    ),
}


@pytest.mark.parametrize(("args", "reason"), WRONG.values(), ids=WRONG)
def test_sides_that_are_not_there_are_one_line(db, args, reason):
    assert refusal(*args, "--db", db) == reason
