"""The schema: columns for every field, constraints that hold, schema.sql in step."""

import sqlite3
from dataclasses import fields

import pytest
from store_samples import H200, PROBLEM, TOOLCHAIN, decision, run, trial

from autoflash.gpu import Gpu
from autoflash.records import REGIMES, SOURCES, STAGES, STATUSES
from autoflash.runtime.problem import PROBLEM_FIELDS
from autoflash.store import Store, tunedb_dir
from autoflash.store.rows import TRIAL_COLUMNS, WINNER_COLUMNS
from autoflash.store.schema import schema_sql
from autoflash.toolchain import Toolchain

TABLES = ("gpus", "toolchains", "kernels", "problems", "configs", "runs", "run_problems")
TABLES = (*TABLES, "trials", "decisions")


@pytest.fixture
def store(tmp_path):
    with Store.open(tmp_path / "autoflash.db") as store:
        yield store


def columns(store, table):
    return [row[1] for row in store.conn.execute(f"PRAGMA table_info({table})")]


def test_schema_sql_is_what_the_migrations_make():
    text = (tunedb_dir() / "schema.sql").read_text()
    assert text == schema_sql(), "run: autoflash db schema > tunedb/schema.sql"


def test_every_table_of_the_design_is_there_and_strict(store):
    strict = {
        row[1]: row[5] for row in store.conn.execute("PRAGMA table_list") if row[2] == "table"
    }
    assert {name: strict.get(name) for name in TABLES} == dict.fromkeys(TABLES, 1)


def test_problems_have_one_column_per_field_of_a_problem(store):
    assert columns(store, "problems") == ["id", *PROBLEM_FIELDS]


@pytest.mark.parametrize(("table", "record"), [("gpus", Gpu), ("toolchains", Toolchain)])
def test_gpus_and_toolchains_have_one_column_per_field(store, table, record):
    assert columns(store, table) == ["id", *(field.name for field in fields(record))]


@pytest.mark.parametrize("table", ["gpus", "toolchains", "kernels", "problems", "configs"])
def test_key_columns_are_never_null_and_unique_together(store, table):
    info = store.conn.execute(f"PRAGMA table_info({table})").fetchall()
    assert all(notnull or pk for _, _, _, notnull, _, pk in info)
    indexes = store.conn.execute(f"PRAGMA index_list({table})").fetchall()
    (index,) = [name for _, name, unique, *_ in indexes if unique]
    key = {row[2] for row in store.conn.execute(f"PRAGMA index_info({index})")}
    assert key == set(columns(store, table)) - {"id", "variant", "text"} or table == "kernels"
    assert table != "kernels" or key == {"family", "digest"}


def test_the_views_have_the_columns_that_query_prints(store):
    of_the_file = {"decision_id", "run_id", "gpu_id"}
    of_the_answer = {"origin", "foreign"}
    assert set(columns(store, "winners")) - of_the_file == set(WINNER_COLUMNS) - of_the_answer
    assert {"place", "best_us", *PROBLEM_FIELDS} <= set(columns(store, "leaderboard"))
    assert len(set(TRIAL_COLUMNS)) == len(TRIAL_COLUMNS)


@pytest.mark.parametrize(
    ("column", "allowed"),
    [("status", STATUSES), ("stage", STAGES), ("source", SOURCES), ("regime", REGIMES)],
)
def test_a_word_of_a_trial_is_one_of_its_list(store, column, allowed):
    store.record_trial(run(store), trial(us=None))
    for word in allowed:
        store.conn.execute(f"UPDATE trials SET {column} = ?", (word,))
    with pytest.raises(sqlite3.IntegrityError):
        store.conn.execute(f"UPDATE trials SET {column} = 'other'")


def test_a_decision_is_measured_or_predicted(store):
    store.record_decision(run(store), decision())
    with pytest.raises(sqlite3.IntegrityError):
        store.conn.execute("UPDATE decisions SET source = 'guessed'")


def test_what_was_not_timed_has_no_time(store):
    with pytest.raises(sqlite3.IntegrityError):
        store.record_trial(run(store), trial(us=7.0, regime="none"))


def test_a_trial_of_no_run_is_refused_and_leaves_nothing_behind(store):
    with pytest.raises(sqlite3.IntegrityError):
        store.record_trial(99, trial())
    assert store.conn.execute("SELECT count(*) FROM problems").fetchone() == (0,)


def test_columns_that_hold_json_end_in_json_and_are_sorted(store):
    started = store.start_run(
        H200, TOOLCHAIN, seed=0, effort="max", budget_s=60, argv=["b", "a"], protocol="graph"
    )
    store.record_decision(started, decision(times=((decision().winner, 7.5),)))
    (knobs,) = store.conn.execute("SELECT knobs_json FROM winners").fetchone()
    names = [part.split(":")[0] for part in knobs.strip("{}").split(",")]
    assert names == sorted(names) and len(names) > 2
    for table in TABLES:
        held = store.conn.execute(f"SELECT * FROM {table}").fetchall()
        for name, place in zip(columns(store, table), range(99), strict=False):
            is_json = [str(row[place])[:1] in "[{" for row in held if str(row[place])]
            assert not any(is_json) or name.endswith("_json")


def test_problems_configs_and_gpus_are_stored_once(store):
    for _ in range(2):
        store.record_trial(run(store), trial(PROBLEM))
    for table in ("gpus", "toolchains", "kernels", "problems", "configs"):
        assert store.conn.execute(f"SELECT count(*) FROM {table}").fetchone() == (1,)
