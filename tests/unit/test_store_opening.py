"""Opening a database: where it lies, whose it is, and every refusal in one line."""

import os
import shutil
import sqlite3
import tempfile
import threading
from pathlib import Path

import pytest
from store_samples import decision, run, trial

from autoflash.errors import StoreError
from autoflash.store import Store, StoreWarning, default_path, opening, users_database

NOBODY = 65534


@pytest.fixture
def path(tmp_path):
    """A database with one trial and one decision."""
    path = tmp_path / "autoflash.db"
    with Store.open(path) as store:
        store.record_trial(run(store), trial())
        store.record_decision(run(store), decision())
    return path


@pytest.fixture
def plain_user():
    """The rights of one who is not root, for whom permissions count, and a folder of theirs."""
    folder = Path(tempfile.mkdtemp())
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, 0)
        yield folder
        os.setresuid(0, 0, 0)
    else:
        yield folder
    folder.chmod(0o700)
    shutil.rmtree(folder)


def refusal(path, readonly=False):
    with pytest.raises(StoreError) as refused:
        Store.open(path, readonly=readonly)
    text = str(refused.value)
    assert "\n" not in text and text.startswith(f"{path}: ")
    return text.removeprefix(f"{path}: ")


def test_the_database_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOFLASH_DB", str(tmp_path / "here.db"))
    assert default_path() == tmp_path / "here.db"
    with Store.open() as store:
        assert store.path == tmp_path / "here.db"
    assert (tmp_path / "here.db").is_file()


def test_the_database_is_else_in_the_users_data_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOFLASH_DB", "")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_path() == tmp_path / "autoflash" / "autoflash.db"


def test_a_given_path_is_honoured_whatever_the_environment_says(monkeypatch, tmp_path):  # case B35
    monkeypatch.setenv("AUTOFLASH_DB", "/proc/nowhere/autoflash.db")
    with Store.open(tmp_path / "mine.db") as store:
        assert store.path == tmp_path / "mine.db"


def test_without_a_home_the_message_says_what_to_give(monkeypatch):  # case B35
    for name in ("AUTOFLASH_DB", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("platformdirs.user_data_dir", lambda *_, **__: "~/.local/share/autoflash")
    with pytest.raises(StoreError, match="give --db or set AUTOFLASH_DB"):
        default_path()


def test_a_home_that_cannot_be_written_is_one_line(monkeypatch, plain_user):  # case B35
    for name in ("AUTOFLASH_DB", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/")
    assert refusal(default_path()) == "cannot make its folder: Permission denied"


def test_a_home_that_cannot_be_looked_into_holds_no_database(monkeypatch, plain_user):
    (plain_user / "autoflash.db").touch()
    monkeypatch.setenv("AUTOFLASH_DB", str(plain_user / "autoflash.db"))
    assert users_database() == plain_user / "autoflash.db"
    plain_user.chmod(0)
    assert users_database() is None
    for readonly in (False, True):
        assert refusal(plain_user / "autoflash.db", readonly) == "Permission denied"


@pytest.mark.parametrize("name", ["a b.db", "Größe 数据.db", "what?mode=rw#x%20.db", ":memory:"])
def test_any_name_of_a_file_will_do(tmp_path, name):  # case B35
    path = tmp_path / "a folder that is made" / name
    with Store.open(path) as store:
        store.record_decision(run(store), decision())
    assert path.is_file()
    with Store.open(path, readonly=True) as store:
        assert len(store.winners()) == 1


def test_opening_waits_for_one_who_writes_to_a_new_file(tmp_path):
    path = tmp_path / "autoflash.db"
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    release = threading.Timer(0.3, lambda: other.execute("ROLLBACK"))
    release.start()
    with Store.open(path) as store:
        assert store.winners() == []
    release.join()
    other.close()


def test_one_who_waits_too_long_is_told(path, monkeypatch):
    monkeypatch.setattr(opening, "BUSY_SECONDS", 0.1)
    with Store.open(path) as holder, opening.transaction(holder.conn):
        assert refusal(path) == "database is locked"


@pytest.mark.parametrize("readonly", [False, True])
def test_a_folder_is_refused(tmp_path, readonly):
    assert refusal(tmp_path, readonly) == "is a folder, not a database"


@pytest.mark.parametrize("readonly", [False, True])
def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path, readonly):
    path = tmp_path / "notes.txt"
    path.write_text("no database, but long enough to be looked at" * 10)
    before = path.read_bytes()
    assert refusal(path, readonly) == "file is not a database"
    assert path.read_bytes() == before


@pytest.mark.parametrize("readonly", [False, True])
def test_another_programs_database_is_refused_and_left_alone(tmp_path, readonly):
    path = tmp_path / "places.sqlite"
    with sqlite3.connect(path) as conn:
        conn.execute("CREATE TABLE places (url TEXT)")
    conn.close()
    before = path.read_bytes()
    assert refusal(path, readonly) == "is a database, but not one of autoflash"
    assert path.read_bytes() == before


@pytest.mark.parametrize("readonly", [False, True])
def test_a_newer_autoflashs_database_is_refused(path, readonly):
    with sqlite3.connect(path) as conn:
        conn.execute(
            "INSERT INTO _sqlite_migrations (migration_set, name, applied_at) "
            "VALUES ('autoflash', 'm999_future', '')"
        )
    conn.close()
    assert refusal(path, readonly) == "written by a newer autoflash, which knows m999_future"


def test_a_damaged_database_is_told_in_one_line(path):
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * 4096 * 20)
    with pytest.raises(StoreError, match="malformed"), Store.open(path) as store:
        store.winners()


@pytest.mark.parametrize(
    "path", ["/proc/nowhere/autoflash.db", "/dev/null/autoflash.db"], ids=["proc", "file"]
)
def test_a_place_where_no_folder_can_be_made_is_refused(path):
    assert refusal(Path(path)).startswith("cannot make its folder: ")


def test_a_folder_that_cannot_be_written_is_refused(plain_user):
    plain_user.chmod(0o555)
    assert refusal(plain_user / "autoflash.db") == "unable to open database file"


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_done(plain_user):  # case B35
    path = plain_user / "autoflash.db"
    Store.open(path).close()
    path.chmod(0o444)
    assert refusal(path) == "attempt to write a readonly database"


def test_to_look_needs_a_file_that_is_there(tmp_path):
    path = tmp_path / "autoflash.db"
    assert refusal(path, readonly=True) == "there is no such database"
    path.touch()
    assert "made by an older autoflash, or empty" in refusal(path, readonly=True)


def test_one_who_only_looks_cannot_write(path):
    with Store.open(path, readonly=True) as store:
        assert len(store.winners()) == 1
        with pytest.raises(StoreError, match="readonly"):
            run(store)


@pytest.mark.filterwarnings("error")
def test_a_read_only_database_in_a_read_only_folder_can_be_looked_at(plain_user):  # case B35
    path = plain_user / "autoflash.db"
    with Store.open(path) as store:
        store.record_decision(run(store), decision())
    path.chmod(0o444)
    plain_user.chmod(0o555)
    with Store.open(path, readonly=True) as store:
        assert len(store.winners()) == 1


def test_looking_without_a_place_for_locks_warns_of_what_is_not_seen(plain_user):
    path, copies = plain_user / "autoflash.db", plain_user / "copies"
    with Store.open(path) as store:
        store.record_decision(run(store), decision(us=7.0))
    copies.mkdir()
    with Store.open(path) as store:
        store.record_decision(run(store), decision(us=5.0))
        for name in (path.name, path.name + "-wal"):
            shutil.copy(plain_user / name, copies)
    copies.chmod(0o555)
    with pytest.warns(StoreWarning) as warned:
        with Store.open(copies / path.name, readonly=True) as store:
            assert store.winners()[0].decision.winner_us == 7.0
        copies.chmod(0o755)
    assert "what is still in autoflash.db-wal is not seen" in str(warned[0].message)


@pytest.mark.filterwarnings("error")
def test_a_search_that_runs_in_a_folder_of_someone_elses_can_be_watched(plain_user):
    path = plain_user / "autoflash.db"
    with Store.open(path) as writer:
        plain_user.chmod(0o555)
        writer.record_decision(run(writer), decision())
        with Store.open(path, readonly=True) as reader:
            assert len(reader.winners()) == 1


def test_a_lookup_sees_what_a_running_search_has_just_committed(path):
    with Store.open(path) as writer, Store.open(path, readonly=True) as reader:
        writer.record_decision(run(writer), decision(us=3.0))
        assert reader.winners()[0].decision.winner_us == 3.0
