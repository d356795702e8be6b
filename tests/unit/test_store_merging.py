"""Merging: no row is lost, none is doubled, the winners are those of all, all of it or nothing."""

import shutil
import sqlite3
import threading
from collections import Counter
from contextlib import closing
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlite_utils import Database
from store_samples import A100, H200, OLDER, PROBLEM, TOOLCHAIN, decision, exported, run, trial
from store_writer import Writer

from autoflash.cli import main
from autoflash.errors import StoreError
from autoflash.store import Store, load_winners, merging
from autoflash.store.checking import check
from autoflash.store.merging import KEYS, MADE_IN_RUNS, MADE_ONCE, merge
from autoflash.store.schema import MIGRATIONS
from autoflash.store.winners import dump_winners

TABLES = (*KEYS, "runs", *MADE_ONCE, *MADE_IN_RUNS)
TIMES = ["2026-01-01T00:00:00.000+00:00", "2026-01-02T00:00:00+00:00", "2026-01-03T00:00:00Z"]

# (GPU, toolchain, what the run made: shape, microseconds, when decided or None for a trial alone)
runs = st.tuples(
    st.sampled_from([H200, A100, replace(H200, power_limit_w=500)]),
    st.sampled_from([TOOLCHAIN, OLDER]),
    st.lists(
        st.tuples(
            st.integers(1, 3), st.sampled_from([5.0, 7.5, 9.0]), st.none() | st.sampled_from(TIMES)
        ),
        max_size=5,
    ),
)
databases = st.lists(runs, max_size=4)


def fill(path, of_runs, uids=True):
    with Store.open(path) as store:
        for gpu, toolchain, made in of_runs:
            started = run(store, gpu, toolchain)
            for batch, us, at in made:
                problem = replace(PROBLEM, batch=batch)
                store.add_problem(started, problem, us)
                store.record_trial(started, trial(problem, us=us))
                if at:
                    row = store.record_decision(started, decision(problem, us=us))
                    store.conn.execute(
                        "UPDATE decisions SET decided_at = ? WHERE id = ?", (at, row)
                    )
            store.end_run(started, "finished")
        store.conn.execute("UPDATE runs SET started_at = '2026-01-01T00:00:00'")
        if not uids:  # as before there were any
            store.conn.execute("UPDATE runs SET uid = ''")
    return path


def counts(path):
    with Store.open(path, readonly=True) as store:
        return {
            table: store.conn.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            for table in TABLES
        }


def content(path):
    """The trials, what they refer to written out, as a multiset."""
    with Store.open(path, readonly=True) as store:
        trials = (store.trials(gpu, chain) for gpu in (H200, A100) for chain in (TOOLCHAIN, OLDER))
        return Counter(each for some in trials for each in some)


def winners(path):
    with Store.open(path, readonly=True) as store:
        return store.winners()


def key_of(winner):
    return (winner.gpu.identity, winner.toolchain, winner.decision.problem, winner.decision.source)


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(first=databases, second=databases, uids=st.booleans())
def test_every_row_of_each_is_kept_once_and_the_winners_are_those_of_all(
    tmp_path_factory, first, second, uids
):
    folder = tmp_path_factory.mktemp("merged")
    a, b, out = (folder / f"{name}.db" for name in ("a", "b", "out"))
    fill(a, first, uids), fill(b, second)
    merge([a, b], out)
    of_a, of_b, merged = counts(a), counts(b), counts(out)
    for table in ("runs", "run_problems", *MADE_IN_RUNS):
        assert merged[table] == of_a[table] + of_b[table], table
    assert content(out) == content(a) + content(b)
    latest = {}
    for each in [*winners(a), *winners(b)]:  # the later of two of the same moment
        held = latest.get(key_of(each))
        if held is None or each.decided_at >= held.decided_at:
            latest[key_of(each)] = each
    assert {key_of(each): each for each in winners(out)} == latest
    for again in ([a, b], [b, a], [out]):
        assert all(not (m.runs or m.trials or m.decisions) for m in merge(again, out))
    assert counts(out) == merged
    with Store.open(out, readonly=True) as store:
        assert not [finding for finding in check(store) if finding.bad]


def test_gpus_of_two_types_stand_side_by_side_and_only_what_is_shared_is_joined(tmp_path):
    a = fill(tmp_path / "a.db", [(H200, TOOLCHAIN, [(1, 7.5, TIMES[0])])])
    b = fill(tmp_path / "b.db", [(A100, TOOLCHAIN, [(1, 9.0, TIMES[0]), (2, 9.0, None)])])
    first, second = merge([a, b], tmp_path / "out.db")
    assert (first.runs, first.trials, first.decisions) == (1, 1, 1)
    assert (second.runs, second.trials, second.decisions) == (1, 2, 1)
    merged = counts(tmp_path / "out.db")
    assert (merged["gpus"], merged["toolchains"], merged["problems"]) == (2, 1, 2)
    assert {each.gpu: each.decision.winner_us for each in winners(tmp_path / "out.db")} == {
        H200: 7.5,
        A100: 9.0,
    }


def test_a_run_that_went_on_after_it_was_merged_brings_only_the_rest(tmp_path):
    a, out = tmp_path / "a.db", tmp_path / "out.db"
    with Store.open(a) as store:
        started = run(store)
        for _ in range(2):  # equal in all but when
            store.record_trial(started, trial())
        merge([a], out)
        for us in (7.5, 6.0):
            store.record_trial(started, trial(us=us))
        store.end_run(started, "finished")
    (added,) = merge([a], out)
    assert (added.runs, added.trials) == (0, 2) and counts(out)["trials"] == 4
    with Store.open(out, readonly=True) as store:
        assert store.conn.execute("SELECT outcome FROM runs").fetchall() == [("finished",)]


def test_two_runs_begun_alike_at_one_moment_are_two(tmp_path):
    alike = [(H200, TOOLCHAIN, [(1, 7.5, None)])]
    a, b, out = (tmp_path / f"{name}.db" for name in ("a", "b", "out"))
    merge([fill(a, alike), fill(b, alike)], out)
    assert (counts(out)["runs"], counts(out)["trials"]) == (2, 2)


def test_runs_alike_in_one_database_that_knows_no_uids_stay_apart(tmp_path):
    alike = [(H200, TOOLCHAIN, [(n, 7.5, None)]) for n in (1, 2)]
    path, out = fill(tmp_path / "a.db", alike, uids=False), tmp_path / "out.db"
    assert [merge([path], out)[0].trials for _ in range(2)] == [2, 0]
    assert counts(out)["runs"] == 2


def test_of_rows_that_are_equal_as_many_are_kept_as_there_are(tmp_path):
    path, out = tmp_path / "a.db", tmp_path / "out.db"
    with Store.open(path) as store:
        started = run(store)
        for expected in (1, 2):
            store.record_trial(started, trial())
            store.conn.execute("UPDATE trials SET recorded_at = '2026-01-01T00:00:00'")
            merge([path], out)
            assert counts(out)["trials"] == expected


def test_a_kernels_text_is_kept_from_whichever_has_it(tmp_path):
    a, b, out = (tmp_path / f"{name}.db" for name in ("a", "b", "out"))
    fill(a, [(H200, TOOLCHAIN, [(1, 7.5, TIMES[0])])])
    dump_winners(winners(a), tmp_path)
    with Store.open(b) as store:
        load_winners(store, tmp_path / "NVIDIA_H200.jsonl")  # brings no text
    with Store.open(a) as store:
        store.add_kernel("decode", "decode", "d1", "the text")
    for paths in ([a, b], [b, a]):
        merge(paths, out)
        with Store.open(out, readonly=True) as store:
            assert store.conn.execute("SELECT text FROM kernels").fetchall() == [("the text",)]
        out.unlink()
    with Store.open(b) as store:  # a digest is of the text without its comments
        store.add_kernel("decode", "decode", "d1", "the text  # and more")
    merge([a, b], out)
    with Store.open(out, readonly=True) as store:
        assert store.conn.execute("SELECT text FROM kernels").fetchall() == [("the text",)]


def test_the_output_may_be_one_of_the_inputs(tmp_path):
    a = fill(tmp_path / "a.db", [(H200, TOOLCHAIN, [(1, 7.5, None)])])
    b = fill(tmp_path / "b.db", [(A100, TOOLCHAIN, [(1, 9.0, None)])])
    merge([a, b], a)
    assert counts(a)["trials"] == 2 and counts(b)["trials"] == 1


def older(path, migration):
    """A database as it was before this migration, with one run."""
    newest = path.with_suffix(".newest.db")
    fill(newest, [(H200, TOOLCHAIN, [(1, 7.5, TIMES[0])])])
    with closing(sqlite3.connect(path, isolation_level=None)) as conn:
        MIGRATIONS.apply(Database(conn, execute_plugins=False), stop_before=migration)
        conn.execute("ATTACH ? AS newest", (str(newest),))
        for table in TABLES:
            columns = ", ".join(row[1] for row in conn.execute(f"PRAGMA main.table_info({table})"))
            if columns:  # else the table came with a later migration
                copied = f"SELECT {columns} FROM newest.{table}"
                conn.execute(f"INSERT INTO {table} ({columns}) {copied}")
    return path


LATER = [migration.name for migration in MIGRATIONS.pending(Database(memory=True))][1:]


@pytest.mark.parametrize("migration", LATER)
def test_a_database_of_an_older_schema_is_merged_and_left_as_it_is(tmp_path, migration):
    path, out = older(tmp_path / "old.db", migration), tmp_path / "out.db"
    for expected in (1, 0):
        (added,) = merge([path], out)
        assert (added.runs, added.trials, added.decisions) == (expected,) * 3
    with pytest.raises(StoreError, match="older"):
        Store.open(path, readonly=True)


@pytest.mark.parametrize("migration", LATER)
def test_a_database_of_an_older_schema_keeps_every_row_when_it_is_written_to(tmp_path, migration):
    path = older(tmp_path / "old.db", migration)
    with Store.open(path) as store:
        (found,) = store.winners()
        assert found.decision.problem == replace(PROBLEM, batch=1)
        assert [each.problem for each in store.trials(H200, TOOLCHAIN)] == [found.decision.problem]
        store.record_trial(run(store), trial(replace(PROBLEM, page_size=16, pages="shared")))
        assert store.conn.execute("PRAGMA foreign_key_check").fetchall() == []
        assert store.conn.execute("SELECT pages FROM problems").fetchall() == [
            ("none",),
            ("shared",),
        ]
        assert not [finding for finding in check(store) if finding.bad and finding.count]


def newer(path):
    fill(path, [])
    with sqlite3.connect(path) as conn:
        conn.execute(
            "INSERT INTO _sqlite_migrations (migration_set, name, applied_at) "
            "VALUES ('autoflash', 'm999_later', '2030-01-01')"
        )
    conn.close()


def damaged(path):
    fill(path, [(H200, TOOLCHAIN, [(1 + n % 3, 7.5, None) for n in range(200)])])
    with sqlite3.connect(path) as conn:
        conn.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    conn.close()
    data = bytearray(path.read_bytes())
    data[4096 * 12 : 4096 * 40] = b"\xff" * (4096 * 28)
    path.write_bytes(data)


def dangling(path):
    fill(path, [(H200, TOOLCHAIN, [(1, 7.5, None)])])
    with sqlite3.connect(path) as conn:
        conn.execute("UPDATE trials SET config_id = 77")
    conn.close()


BROKEN = {
    "newer": (newer, "written by a newer autoflash"),
    "damaged": (damaged, "damaged|malformed"),
    "dangling": (dangling, "damaged"),
    "text": (lambda path: path.write_text("not a database" * 100), "not a database"),
    "empty": (lambda path: path.write_bytes(b""), "is empty"),
    "folder": (lambda path: path.mkdir(), "is a folder"),
    "missing": (lambda path: None, "there is no such database"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_input_that_cannot_be_read_is_refused_in_a_line_and_nothing_is_written(
    tmp_path, name, capsys, monkeypatch
):
    make, why = BROKEN[name]
    good, bad, out = (tmp_path / f"{each}.db" for each in ("good", "bad", "out"))
    fill(good, [(H200, TOOLCHAIN, [(1, 7.5, None)])])
    make(bad)
    with pytest.raises(StoreError, match=why):
        merge([good, bad], out)
    assert not out.exists()
    shutil.copy(good, out)
    monkeypatch.setattr(
        "sys.argv", ["autoflash", "db", "merge", str(good), str(bad), "-o", str(out)]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 1 and line.startswith(f"error: {bad}")
    assert counts(out) == counts(good)


def test_a_merge_that_fails_half_way_adds_nothing(tmp_path, monkeypatch):
    a, b, out = (tmp_path / f"{each}.db" for each in ("a", "b", "out"))
    for path in (a, b):
        fill(path, [(H200, TOOLCHAIN, [(1, 7.5, None)])])
    add, added = merging._add, []

    def second_fails(source, target, path):
        if added:
            raise StoreError("disk is full")
        added.append(add(source, target, path))
        return added[0]

    monkeypatch.setattr(merging, "_add", second_fails)
    with pytest.raises(StoreError, match="disk is full"):
        merge([a, b], out)
    assert added[0].trials == 1 and not out.exists()
    shutil.copy(a, out)
    before = counts(out)
    added.clear()
    with pytest.raises(StoreError, match="disk is full"):
        merge([b, a], out)
    assert added[0].trials == 1 and counts(out) == before


def test_a_reader_sees_the_output_as_it_was_or_with_all_of_it(tmp_path):
    out = fill(tmp_path / "out.db", [(H200, TOOLCHAIN, [(1, 7.5, None)])])
    big = fill(tmp_path / "big.db", [(A100, TOOLCHAIN, [(1, 9.0, TIMES[0])] * 300)])
    seen, began, done = set(), threading.Event(), threading.Event()

    both = "SELECT (SELECT count(*) FROM runs), (SELECT count(*) FROM trials)"

    def read():
        while not done.is_set():
            with Store.open(out, readonly=True) as store:
                seen.add(store.conn.execute(both).fetchone())
            began.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert began.wait(10)
    merge([big], out)
    done.set()
    reader.join()
    assert (1, 1) in seen and seen <= {(1, 1), (2, 301)} and counts(out)["trials"] == 301


def test_an_input_that_another_process_is_writing_to_is_read_as_it_is(tmp_path):
    a, out = fill(tmp_path / "a.db", [(H200, TOOLCHAIN, [(1, 7.5, None)])]), tmp_path / "out.db"
    writer = Writer()
    writer.tell("hold", a)
    assert writer.heard() == "inside"  # of a transaction that never ends
    (added,) = merge([a], out)
    writer.end()
    assert added.trials == 1


def test_exports_of_every_database_are_kept_and_none_is_doubled(tmp_path):
    paths = [tmp_path / "a.db", tmp_path / "b.db"]
    for path, gpu in zip(paths, (A100, H200), strict=True):
        with Store.open(path) as store:
            store.record_export(
                "a" * 64, 4, [exported(gpu), exported(gpu, replace(PROBLEM, batch=9))]
            )
    output = tmp_path / "out.db"
    for _ in range(2):
        merge(paths, output)
    with Store.open(output, readonly=True) as store:
        rows = store.conn.execute(
            "SELECT exports.uid, gpus.name, problems.batch FROM exported_problems "
            "JOIN exports ON exports.id = export_id JOIN gpus ON gpus.id = gpu_id "
            "JOIN problems ON problems.id = problem_id"
        ).fetchall()
    assert len({uid for uid, *_ in rows}) == 2
    assert sorted((name, batch) for _, name, batch in rows) == sorted(
        (gpu.name, batch) for gpu in (A100, H200) for batch in (PROBLEM.batch, 9)
    )
