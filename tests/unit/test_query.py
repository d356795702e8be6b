"""`autoflash query`: what is printed, in which form, and which rows."""

import csv
import io
import json
import sqlite3
import sys
from dataclasses import replace

import pytest
from store_samples import (
    A100,
    H200,
    OLDER,
    PROBLEM,
    TOOLCHAIN,
    config,
    decision,
    run,
    trial,
    winner,
)
from typer.testing import CliRunner

from autoflash.cli import app, table
from autoflash.errors import StoreError
from autoflash.problem import Problem
from autoflash.store import Store, dump_winners
from autoflash.store.foreign import foreign_reason, here, names

PREFILL = Problem("prefill", "fp16", 4, 16, 16, 64, 512, 512)
PAGED = replace(PROBLEM, batch=8, page_size=16)
ERROR = "line 3:\n\tno [b]dot[/b]"


@pytest.fixture(autouse=True)
def nothing_is_shipped_and_triton_is_known(monkeypatch, tmp_path):
    monkeypatch.setattr("autoflash.store.store.tunedb_dir", lambda: tmp_path / "tunedb")
    monkeypatch.setattr("autoflash.store.foreign.version", lambda _: "3.6.0")
    monkeypatch.setattr("autoflash.store.foreign._from_nvml", dict)
    monkeypatch.setenv("AUTOFLASH_DB", str(tmp_path / "yours.db"))


@pytest.fixture
def db(tmp_path):
    """Three problems decided on an H200, one on an A100; a trial of each status on the first."""
    path = tmp_path / "autoflash.db"
    with Store.open(path) as store:
        started = run(store)
        for place, problem in enumerate((PROBLEM, PREFILL, PAGED)):
            store.record_decision(started, decision(problem, us=7.0 + place))
        store.record_trial(started, trial(us=7.0))
        store.record_trial(
            started, trial(us=None, status="compile", error="line 3:\n\tno [b]dot[/b]")
        )
        store.record_trial(started, trial(PREFILL, us=9.0))
        store.record_decision(run(store, A100), decision(us=20.0))
    return path


def ask(*args):
    return CliRunner().invoke(app, ["query", *map(str, args)])


def rows(*args):
    """The rows that a question gives, and nothing else on stdout."""
    result = ask(*args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refusal(*args):
    result = ask(*args)
    assert isinstance(result.exception, StoreError) and result.stdout == ""
    assert "\n" not in str(result.exception)
    return str(result.exception)


FILTERS = {
    "nothing": ([], [20.0, 7.0, 9.0, 8.0]),
    "gpu": (["--gpu", "NVIDIA H200"], [7.0, 9.0, 8.0]),
    "gpu by a word of its name": (["--gpu", "a100"], [20.0]),
    "gpu by a piece of a word": (["--gpu", "A10"], []),
    "op": (["--op", "prefill"], [8.0]),
    "dtype": (["--dtype", "fp16"], [8.0]),
    "head_dim": (["--head-dim", 64], [8.0]),
    "num_heads": (["--num-heads", 16], [8.0]),
    "num_kv_heads": (["--num-kv-heads", 16], [8.0]),
    "batch": (["--batch", 8], [9.0]),
    "seqlen_q": (["--seqlen-q", 512], [8.0]),
    "seqlen_k": (["--seqlen-k", 512], [8.0]),
    "paged": (["--paged"], [9.0]),
    "contiguous": (["--contiguous", "--gpu", "H200"], [7.0, 8.0]),
    "family": (["--family", "prefill"], []),
    "two of them": (["--op", "decode", "--batch", 1], [20.0, 7.0]),
}


@pytest.mark.parametrize(("args", "times"), FILTERS.values(), ids=FILTERS)
def test_a_filter_keeps_the_winners_it_names(db, args, times):
    assert [row["winner_us"] for row in rows("--db", db, *args)] == times


def test_trials_are_printed_failed_ones_too(db):
    found = rows("--db", db, "--trials")
    assert [row["status"] for row in found] == ["correct", "compile", "correct"]
    assert found[1]["error"] == ERROR and found[1]["median_us"] is None
    assert [row["id"] for row in rows("--db", db, "--trials", "--status", "compile")] == [2]
    assert [row["op"] for row in rows("--db", db, "--trials", "--op", "prefill")] == ["prefill"]


def test_a_limit_is_told(db):
    result = ask("--db", db, "--limit", 2)
    assert len(result.stdout.splitlines()) == 3
    assert result.stderr == "notice: 2 of 4 rows\n"


def test_the_table_is_aligned_and_each_row_one_line(db):
    result = ask("--db", db, "--trials")
    lines = result.stdout.splitlines()
    assert len(lines) == 4 and result.stderr == ""
    assert lines[0].split()[:4] == ["id", "gpu", "op", "dtype"]
    assert lines[2].endswith("line 3: no [b]dot[/b]")
    assert len({line.index("  bf16  ") for line in lines[1:3]}) == 1


def test_what_was_only_predicted_does_not_look_like_a_time(db):
    with Store.open(db) as store:
        only = replace(PROBLEM, batch=77)
        store.record_decision(run(store), decision(only, us=123.0, source="predicted"))
    text = ask("--db", db, "--batch", 77).stdout
    assert "predicted" in text and "123" not in text
    assert rows("--db", db, "--batch", 77)[0]["winner_us"] == 123.0


def test_a_cell_shows_every_knob_and_the_beginning_of_a_long_error(db):
    with Store.open(db) as store:
        error = "mlir " * 100
        store.record_trial(run(store), trial(us=None, status="compile", error=error))
    shown = ask("--db", db, "--trials").stdout.splitlines()[-1]
    assert config().to_json() in shown
    assert shown.endswith("mlir ml...") and shown.count("mlir ") == 39


def test_a_terminal_gets_a_drawn_table_with_the_text_as_it_is(db, monkeypatch, capsys):
    monkeypatch.setattr(table.sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    table.print_table(("error", "us"), [("no [b]dot[/b]", 7.0)])
    out = capsys.readouterr().out
    assert "no [b]dot[/b]" in out and "─" in out


def test_csv_holds_every_column_and_plain_values(db):
    text = ask("--db", db, "--trials", "--csv").stdout
    found = list(csv.DictReader(io.StringIO(text)))
    assert [row["median_us"] for row in found] == ["7.0", "", "9.0"]
    assert found[1]["error"] == ERROR
    assert json.loads(found[0]["knobs_json"]) == config().as_dict()
    assert found[0]["causal"] == "1"


def test_csv_of_no_rows_is_its_header(db):
    result = ask("--db", db, "--batch", 99, "--csv")
    assert result.stdout.startswith("gpu,arch,num_sms,") and result.stdout.count("\n") == 1


def test_json_holds_what_json_columns_hold(db):
    row = rows("--db", db, "--op", "prefill")[0]
    assert row["knobs_json"] == config().as_dict() and row["tied_json"] == []
    assert (row["origin"], row["triton"], row["weight"]) == ("user", "3.6.0", 1.0)
    assert rows("--db", db, "--batch", 99) == []


def test_json_has_no_word_for_infinity(db):
    with Store.open(db) as store:
        store.record_trial(run(store), trial(us=None, status="correctness", max_ratio=1e999))
    assert rows("--db", db, "--trials", "--status", "correctness")[0]["max_ratio"] is None


def test_no_rows_are_told_beside_the_output(db):
    result = ask("--db", db, "--batch", 99)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "notice: no rows\n")


def test_the_users_rows_hide_the_shipped(db, tmp_path):
    other = replace(PROBLEM, batch=2)
    dump_winners([winner(us=1.0), winner(us=2.0, problem=other)], tmp_path / "tunedb" / "winners")
    found = rows("--db", db, "--gpu", "H200", "--op", "decode")
    assert [(row["winner_us"], row["origin"]) for row in found] == [
        (7.0, "user"),
        (2.0, "shipped"),
        (9.0, "user"),
    ]


def test_without_a_database_the_shipped_winners_are_shown_and_none_is_made(tmp_path):
    dump_winners([winner(us=1.0)], tmp_path / "tunedb" / "winners")
    result = ask("--csv")
    assert len(result.stdout.splitlines()) == 2
    assert result.stderr == "notice: you have no database yet: shipped winners only\n"
    assert not (tmp_path / "yours.db").exists()


def test_a_database_that_was_named_must_be_there(tmp_path):
    assert refusal("--db", tmp_path / "no.db") == f"{tmp_path}/no.db: there is no such database"
    assert refusal("--db", tmp_path / "no.db", "--trials").endswith("there is no such database")


@pytest.mark.parametrize("asked", ["--trials", "--failures"])
def test_without_a_database_there_are_no_trials_and_it_is_said_who_makes_some(tmp_path, asked):
    dump_winners([winner(us=1.0)], tmp_path / "tunedb" / "winners")
    assert refusal(asked) == (
        "you have no database yet, and shipped winners come without trials:"
        " `autoflash tune` makes some"
    )
    assert not (tmp_path / "yours.db").exists()


def test_without_a_database_sql_asks_the_shipped_winners(tmp_path):
    dump_winners([winner(us=1.0), winner(A100, us=2.0)], tmp_path / "tunedb" / "winners")
    result = ask("--sql", "SELECT gpu, winner_us FROM winners ORDER BY winner_us", "--csv")
    assert result.stdout.splitlines()[1:] == ["NVIDIA H200,1.0", "NVIDIA A100-SXM4-80GB,2.0"]
    assert result.stderr == "notice: you have no database yet: shipped winners only\n"
    assert refusal("--sql", "DELETE FROM trials") == "--sql: only SELECT is allowed"
    assert not (tmp_path / "yours.db").exists()


FOREIGN = {
    "another capability": (replace(H200, arch="sm_100"), TOOLCHAIN, "arch is sm_90 here"),
    "another SM count": (replace(H200, num_sms=114), TOOLCHAIN, "num_sms is 132 here"),
    "another memory size": (replace(H200, memory_gib=94), TOOLCHAIN, "memory_gib is 140 here"),
    "an older triton": (H200, OLDER, "triton is 3.6.0 here"),
    "no triton known": (H200, replace(OLDER, triton=""), "triton is 3.6.0 here"),
    "this type and triton": (H200, replace(TOOLCHAIN, torch="2.12"), ""),
}


@pytest.mark.parametrize(("gpu", "toolchain", "reason"), FOREIGN.values(), ids=FOREIGN)
def test_rows_of_another_type_or_triton_are_listed_as_foreign(  # case B16
    tmp_path, gpu, toolchain, reason
):
    path = tmp_path / "foreign.db"
    with Store.open(path) as store:
        store.record_decision(run(store, gpu, toolchain), decision())
        store.record_trial(run(store, gpu, toolchain), trial())
    for what in ([], ["--trials"]):
        (row,) = rows("--db", path, "--gpu", "H200", *what)
        assert row["foreign"] == reason
        assert (row["num_sms"], row["triton"]) == (gpu.num_sms, toolchain.triton)


def test_what_cannot_be_told_of_this_machine_makes_nothing_foreign(monkeypatch):
    row = {**dict(zip(("gpu", "arch", "num_sms", "memory_gib", "mig_profile"), A100.identity))}
    row |= {"triton": "3.6.0", "driver": "1"}
    assert foreign_reason(row, here()) == ""
    assert foreign_reason(row, here("NVIDIA")) == ""  # names more than one
    assert foreign_reason(row, here("H200")) == "gpu is NVIDIA H200 here"
    assert foreign_reason(row, here() | {"driver": "2"}) == "driver is 2 here"


def test_a_gpu_is_named_by_whole_words():
    assert names("h200", "NVIDIA H200") and names("NVIDIA_H200", "NVIDIA H200")
    assert names("A100-SXM4", "NVIDIA A100-SXM4-80GB") and not names("A10", "NVIDIA A100")


def test_a_row_that_cannot_be_used_is_left_out_with_a_warning(db):
    with sqlite3.connect(db) as conn:
        conn.execute("UPDATE problems SET num_heads = 3 WHERE op = 'prefill'")
    conn.close()
    result = ask("--db", db, "--csv")
    assert len(result.stdout.splitlines()) == 4
    reason = "num_heads 3 is not a multiple of num_kv_heads 16"
    assert result.stderr == f"warning: {db}: 1 row skipped: {reason}\n"


def test_a_question_in_sql_is_answered_in_its_own_columns(db):
    sql = "SELECT op, count(*) AS n, NULL AS none, x'ff' AS raw FROM winners GROUP BY op"
    assert rows("--db", db, "--sql", sql) == [
        {"op": "decode", "n": 3, "none": None, "raw": "ff"},
        {"op": "prefill", "n": 1, "none": None, "raw": "ff"},
    ]
    assert ask("--db", db, "--sql", sql, "--csv").stdout.splitlines()[0] == "op,n,none,raw"
    assert ask("--db", db, "--sql", sql).stdout.splitlines()[2].split()[:2] == ["prefill", "1"]
    assert rows("--db", db, "--sql", sql, "--limit", 1)[0]["n"] == 3
    recursive = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 3) "
    assert len(rows("--db", db, "--sql", recursive + "SELECT i FROM n")) == 3


def test_failures_are_grouped_by_reason(db):
    with Store.open(db) as store:
        for place, line in ((1, 3), (2, 44)):
            error = f"line {line}:\n\tno [b]dot[/b]"
            told = {"us": None, "status": "compile", "error": error, "place": place}
            store.record_trial(run(store), trial(PAGED, **told))
    (row,) = rows("--db", db, "--failures", "--batch", 8)
    assert (row["reason"], row["candidates"], row["problems"]) == ("line #:", 2, 1)
    assert row["example"] == ERROR
    assert rows("--db", db, "--failures", "--op", "prefill") == []


def test_parquet_holds_what_csv_holds(db, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "rows.parquet"
    result = ask("--db", db, "--trials", "--parquet", file)
    assert (result.stdout, result.stderr) == ("", f"notice: {file}: 3 rows\n")
    found = parquet.read_table(file).to_pylist()
    assert [row["median_us"] for row in found] == [7.0, None, 9.0]
    assert found[1]["error"] == ERROR and found[0]["causal"] == 1
    assert list(found[0]) == ask("--db", db, "--trials", "--csv").stdout.splitlines()[0].split(",")
    nowhere = ask("--db", db, "--parquet", tmp_path / "no" / "rows.parquet")
    assert "cannot be written" in str(nowhere.exception)


def test_parquet_without_pyarrow_says_what_to_install(db, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    result = ask("--db", db, "--parquet", tmp_path / "rows.parquet")
    assert str(result.exception) == ("--parquet needs pyarrow: pip install 'autoflash[parquet]'")
    assert not (tmp_path / "rows.parquet").exists()


WRONG_SQL = {
    "an unknown column": ("SELECT nope FROM winners", "no such column: nope"),
    "an unknown table": ("SELECT 1 FROM nope", "no such table: nope"),
    "no SQL": ("winners please", 'near "winners": syntax error'),
    "nothing": (" -- nothing", "there is no statement in it"),
    "two statements": ("SELECT 1; SELECT 2", "You can only execute one statement at a time."),
    "a bad argument": ("SELECT json('x') FROM winners", "malformed JSON"),
}
WRITING_SQL = (
    "DELETE FROM trials",
    "DROP TABLE trials",
    "UPDATE runs SET outcome = 'x'",
    "PRAGMA journal_mode=DELETE",
    "ATTACH 'other.db' AS other",
    "VACUUM INTO 'other.db'",
    "BEGIN IMMEDIATE",
    "CREATE TEMP TABLE t (x)",
)


@pytest.mark.parametrize(("sql", "reason"), WRONG_SQL.values(), ids=WRONG_SQL)
def test_a_mistake_in_sql_is_one_line(db, sql, reason):
    assert refusal("--db", db, "--sql", sql) == f"--sql: {reason}"


@pytest.mark.parametrize("sql", WRITING_SQL)
def test_sql_can_only_read(db, sql, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    assert refusal("--db", db, "--sql", sql) == "--sql: only SELECT is allowed"
    after = sorted(path.name for path in tmp_path.iterdir())
    assert [name for name in after if name not in before and "-" not in name] == []
    assert len(rows("--db", db, "--trials")) == 3


@pytest.mark.parametrize(
    "args",
    [
        ["--sql", "SELECT 1", "--op", "decode"],
        ["--sql", "SELECT 1", "--trials"],
        ["--sql", "SELECT 1", "--contiguous"],
        ["--status", "correct"],
        ["--json", "--csv"],
        ["--csv", "--parquet", "x.parquet"],
        ["--trials", "--failures"],
        ["--diff", "run", "--failures"],
        ["--diff", "speed"],
        ["--between", "1,2"],
        ["--diff", "gpu", "--gpu", "H200"],
        ["--diff", "run", "--family", "decode"],
        ["--sql", "SELECT 1", "--diff", "run"],
        ["--limit", "0"],
        ["--batch", "-1"],
        ["--op", "forward"],
        ["--head-dim", "True"],
    ],
)
def test_wrong_usage_ends_with_2(args):
    result = ask(*args)
    assert result.exit_code == 2 and result.stdout == ""
