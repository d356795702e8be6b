"""`autoflash db`: path, schema, dump, load and check."""

import json
import sqlite3
from dataclasses import replace

import pytest
from store_samples import A100, H200, OLDER, PROBLEM, config, decision, exported, run, trial, winner
from typer.testing import CliRunner

from autoflash.cli import app
from autoflash.errors import StoreError
from autoflash.records import Profile
from autoflash.store import Store, read_winners, tunedb_dir


@pytest.fixture
def db(tmp_path, monkeypatch):
    """A database of the user's own, with a winner of two GPUs."""
    path = tmp_path / "autoflash.db"
    monkeypatch.setenv("AUTOFLASH_DB", str(path))
    with Store.open(path) as store:
        for gpu in (H200, A100):
            started = run(store, gpu)
            store.record_trial(started, trial())
            store.record_decision(started, decision())
            store.end_run(started, "finished")
    return path


def do(*args):
    return CliRunner().invoke(app, ["db", *map(str, args)])


def test_path_is_the_one_the_other_commands_use(db, tmp_path):
    assert do("path").stdout == f"{db}\n"
    assert do("path", "--db", tmp_path / "other.db").stdout == f"{tmp_path}/other.db\n"


def test_schema_is_what_is_shipped():
    assert do("schema").stdout == (tunedb_dir() / "schema.sql").read_text()


def test_dump_and_load_go_from_a_database_to_another(db, tmp_path):
    result = do("dump", "-o", tmp_path / "out")
    files = [
        tmp_path / "out" / name for name in ("NVIDIA_A100_SXM4_80GB.jsonl", "NVIDIA_H200.jsonl")
    ]
    assert result.stdout.splitlines() == [str(file) for file in files]
    other = tmp_path / "other.db"
    result = do("load", *files, "--db", other)
    assert result.stdout.splitlines() == [f"{file}: 1 new winner" for file in files]
    with Store.open(db) as one, Store.open(other) as two:
        assert one.winners() == two.winners()
    assert do("dump", "-o", tmp_path / "again", "--db", other).exit_code == 0
    for file in files:
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()
    assert do("load", files[0], "--db", other).stdout == f"{files[0]}: 0 new winners\n"


def test_a_dump_of_nothing_is_told(tmp_path):
    Store.open(tmp_path / "empty.db").close()
    result = do("dump", "-o", tmp_path / "out", "--db", tmp_path / "empty.db")
    assert (result.stdout, result.stderr) == ("", "notice: the database holds no winners\n")
    assert not (tmp_path / "out").exists()


def test_a_dump_needs_a_database(tmp_path):
    result = do("dump", "-o", tmp_path, "--db", tmp_path / "no.db")
    assert isinstance(result.exception, StoreError)
    assert not (tmp_path / "no.db").exists()


def test_a_file_that_cannot_be_loaded_leaves_the_database_as_it_was(db, tmp_path):
    file = tmp_path / "winners.jsonl"
    do("dump", "-o", tmp_path)
    text = (tmp_path / "NVIDIA_H200.jsonl").read_text()
    file.write_text(text.replace(OLDER.driver, "1.0") + "{")
    result = do("load", file)
    assert isinstance(result.exception, StoreError) and "line 2: not JSON" in str(result.exception)
    with Store.open(db) as store:
        assert len(store.winners()) == 2
    assert len(read_winners(tmp_path / "NVIDIA_H200.jsonl")) == 1


def test_check_finds_a_sound_database_sound(db):
    result = do("check")
    assert result.exit_code == 0 and result.stderr == ""
    assert all(line.split()[-1] == "0" for line in result.stdout.splitlines()[1:])
    found = json.loads(do("check", "--json").stdout)
    assert {row["count"] for row in found} == {0} and len(found) == 8


def test_check_counts_what_belongs_to_nothing(db):
    with Store.open(db) as store:
        started = run(store, H200, OLDER)
        store.add_kernel("decode", "decode", "d9", "text")
        for sql in (
            "DELETE FROM trials",
            "DELETE FROM decisions",
            f"DELETE FROM runs WHERE id={started}",
        ):
            store.conn.execute(sql)
        store.conn.execute("UPDATE runs SET ended_at = '' WHERE id = 1")
    result = do("check", "--json")
    counts = {row["name"]: row["count"] for row in json.loads(result.stdout)}
    assert result.exit_code == 0
    assert counts == {
        "damaged pages or rows": 0,
        "references to nothing": 0,
        "gpus of nothing": 0,
        "toolchains of nothing": 1,
        "problems of nothing": 1,
        "configs of nothing": 2,
        "kernels of nothing": 2,
        "runs without an end": 1,
    }


def test_load_of_a_file_without_winners_says_so(db, tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    result = do("load", empty)
    assert (result.stdout, result.stderr) == ("", f"notice: {empty}: holds no winners\n")


@pytest.mark.parametrize("record", ["an export", "a profile"])
def test_check_finds_nothing_in_what_an_export_or_a_profile_of_shipped_winners_brings(db, record):
    elsewhere = winner(A100, problem=replace(PROBLEM, batch=77), toolchain=OLDER)
    with Store.open(db) as store:
        if record == "an export":
            own = replace(
                exported(A100, elsewhere.decision.problem), toolchain=OLDER, config=config(4)
            )
            store.record_export("5d" * 32, 4, [own])
        else:
            taken = Profile("attend", 64, 0, 1024, 4, 8, 50.0)
            store.record_profiles(elsewhere, OLDER, [taken])
    found = json.loads(do("check", "--json").stdout)
    assert {row["name"]: row["count"] for row in found if row["count"]} == {}


def test_check_names_references_to_nothing(db):
    with sqlite3.connect(db) as conn:
        conn.execute("DELETE FROM gpus")
    conn.close()
    result = do("check", "--json")
    (row,) = [row for row in json.loads(result.stdout) if row["bad"]]
    assert (row["name"], row["count"], row["detail"]) == ("references to nothing", 2, "runs")
    assert str(result.exception) == f"{db}: references to nothing"


def test_check_names_damage(db):
    with sqlite3.connect(db) as conn:
        conn.execute("PRAGMA writable_schema=ON")
        other = "CREATE INDEX trials_by_run ON trials (problem_id)"
        conn.execute("UPDATE sqlite_master SET sql = ? WHERE name = 'trials_by_run'", (other,))
    conn.close()
    result = do("check", "--json")
    (row,) = [row for row in json.loads(result.stdout) if row["bad"]]
    assert row["name"] == "damaged pages or rows" and "index trials_by_run" in row["detail"]
    assert isinstance(result.exception, StoreError)


def test_check_of_no_database_is_one_line(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("notes " * 200)
    assert str(do("check", "--db", path).exception) == f"{path}: file is not a database"
