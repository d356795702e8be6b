"""Faults of the machine in mid-search: one line, no candidate blamed, nothing half-written."""

import contextlib
import resource
import sqlite3
import threading
import time

import pytest
from fake_device import GPU, machine
from test_tune import PROBLEM, search, stored, tried

from autoflash.child import Child, Failure
from autoflash.errors import AutoflashError, StoreError
from autoflash.groups import rendered_for
from autoflash.kernel import load
from autoflash.pool import TritonCompiler


def in_mid_search(db, work):
    """Search, and do the work once the first trial is stored."""

    def watch():
        with contextlib.suppress(sqlite3.OperationalError):
            while not stored(db, "SELECT count(*) FROM trials")[0][0]:
                time.sleep(0.01)
            return work()
        time.sleep(0.01)
        return watch()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        # the last of the candidates hang: the search is still on when the work is done
        search(db, machine(dict.fromkeys(tried()[12:], "hang")))
    finally:
        thread.join()


def test_a_database_locked_for_too_long_in_mid_search_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("autoflash.store.opening.BUSY_SECONDS", 0.2)
    db = tmp_path / "tune.db"
    locked = sqlite3.connect(":memory:", check_same_thread=False)

    def lock():
        nonlocal locked
        locked = sqlite3.connect(db, check_same_thread=False, isolation_level=None, timeout=10)
        locked.execute("BEGIN IMMEDIATE")

    with pytest.raises(StoreError, match=r"tune.db: database is locked"):
        in_mid_search(db, lock)
    locked.close()
    assert stored(db, "PRAGMA integrity_check") == [("ok",)]
    assert search(db, machine()).reused > 0


def test_a_database_deleted_in_mid_search_is_one_line_and_stays_deleted(tmp_path):
    db = tmp_path / "tune.db"
    with pytest.raises(StoreError, match=r"tune.db: was deleted while it was in use"):
        in_mid_search(db, db.unlink)
    assert not db.exists()


@contextlib.contextmanager
def no_file_beyond(size):
    """As a full disk: what a file would grow beyond this size fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_database_on_a_full_disk_is_one_line_and_whole_afterwards(tmp_path):
    db = tmp_path / "tune.db"
    search(db, machine())
    trials = stored(db, "SELECT count(*) FROM trials")
    with no_file_beyond(4096), pytest.raises(StoreError, match=r"tune.db: ") as error:
        search(db, machine(), seed=1)
    assert "\n" not in str(error.value)
    assert stored(db, "PRAGMA integrity_check") == [("ok",)]
    assert stored(db, "SELECT count(*) FROM trials") == trials


def test_a_kernel_text_that_cannot_be_written_is_one_line_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOFLASH_CACHE", str(tmp_path))
    rendered = rendered_for(PROBLEM, tried()[0])
    with no_file_beyond(64), pytest.raises(AutoflashError, match=r"cannot be written: File too"):
        load(rendered)
    assert list(tmp_path.iterdir()) == []


class StarvedCompiler(TritonCompiler):
    """Compiles where no file can grow."""

    def compile(self, problems, config, gpu, stage=None):
        load(rendered_for(problems[0], config))
        with no_file_beyond(64):
            return super().compile(problems, config, gpu, stage)


def test_no_candidate_is_blamed_for_a_full_compile_cache(tmp_path):
    environment = {"TRITON_CACHE_DIR": str(tmp_path / "empty")}
    child = Child(StarvedCompiler, environment)
    with pytest.raises(AutoflashError, match="kernels cannot be compiled: File too large"):
        try:
            child.call("compile", [PROBLEM], tried()[0], GPU, deadline_s=120)
        except Failure as failure:
            raise AssertionError(f"blamed: {failure}") from None
    child.close()
