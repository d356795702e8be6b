"""Connections to a database file: writable and migrated, or read-only; every refusal one line."""

import os
import sqlite3
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from sqlite_utils import Database

from autoflash.errors import StoreError
from autoflash.store.schema import MIGRATIONS, known_migrations
from autoflash.store.skipping import StoreWarning

BUSY_SECONDS = 60.0

Result = TypeVar("Result")


def open_for_writing(path: Path) -> sqlite3.Connection:
    """A connection to the database at `path`, made and migrated as needed.

    Raises StoreError for a file or folder that cannot be written, and for a file that is no
    database, is another program's, or was written by a newer autoflash.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"{path}: cannot make its folder: {error.strerror}") from None
    with told(path):
        _refuse_folder(path)
        conn = sqlite3.connect(path.absolute(), timeout=BUSY_SECONDS, isolation_level=None)
        try:
            conn.execute("PRAGMA foreign_keys=ON")
            _when_free(lambda: _refuse_stranger(conn, path))
            # WAL needs no sync at each commit to survive a killed process
            conn.execute("PRAGMA synchronous=NORMAL")
            # this pragma ignores the busy timeout
            _when_free(lambda: conn.execute("PRAGMA journal_mode=WAL").fetchall())
            with transaction(conn):
                _refuse_stranger(conn, path)
                MIGRATIONS.apply(Database(conn, execute_plugins=False))
                # BEGIN IMMEDIATE only reads a read-only file; this finds out now, not hours later
                conn.execute("DELETE FROM runs WHERE false")
        except BaseException:
            conn.close()
            raise
    return conn


def open_for_reading(path: Path) -> sqlite3.Connection:
    """A read-only connection to the database at `path`. Raises StoreError as the writable one."""
    with told(path):
        conn = _connected_for_reading(path)
        try:
            if MIGRATIONS.pending(Database(conn, execute_plugins=False)):
                raise StoreError(
                    f"{path}: made by an older autoflash, or empty: `autoflash db load` mends it"
                )
        except BaseException:
            conn.close()
            raise
    return conn


@contextmanager
def snapshot(path: Path) -> Iterator[sqlite3.Connection]:
    """A private copy of the database as it is at this moment, migrated, while others write to it.

    Raises StoreError as the others do, and for a file that is damaged or has no tables.
    """
    with told(path), closing(sqlite3.connect("", isolation_level=None)) as copied:
        with closing(_connected_for_reading(path)) as conn:
            conn.backup(copied)
        damage = [text for (text,) in copied.execute("PRAGMA integrity_check") if text != "ok"]
        damage = damage or copied.execute("PRAGMA foreign_key_check").fetchall()
        if damage:
            raise StoreError(f"{path}: is damaged: `autoflash db check` says how")
        db = Database(copied, execute_plugins=False)
        if not MIGRATIONS.applied(db):
            raise StoreError(f"{path}: is empty, no database of autoflash")
        with transaction(copied):
            MIGRATIONS.apply(db)
        yield copied


@contextmanager
def nothing_yet() -> Iterator[sqlite3.Connection]:
    """A database without rows that is in no file."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as conn:
        MIGRATIONS.apply(Database(conn, execute_plugins=False))
        yield conn


def readonly_uri(path: Path, immutable: bool) -> str:
    """The URI that opens `path` read-only; `immutable` where no file can be made beside it."""
    return path.absolute().as_uri() + "?mode=ro" + ("&immutable=1" if immutable else "")


@contextmanager
def transaction(conn: sqlite3.Connection) -> Iterator[None]:
    """The one way to write: the lock is taken at the start, where waiting for it works.

    A deferred transaction that reads, then writes, fails at once while another one writes.
    """
    path = conn.execute("PRAGMA database_list").fetchone()[2]
    if path and not Path(path).exists():  # sqlite would go on writing to what nobody can open
        raise StoreError(f"{path}: was deleted while it was in use")
    conn.execute("BEGIN IMMEDIATE")
    try:
        yield
        conn.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.OperationalError):  # a full disk has rolled it back already
            conn.execute("ROLLBACK")
        raise


@contextmanager
def told(path: Path) -> Iterator[None]:
    """What sqlite says of the file at `path`, as a StoreError; our own mistakes pass as such."""
    try:
        yield
    except (sqlite3.IntegrityError, sqlite3.ProgrammingError):
        raise
    except sqlite3.DatabaseError as error:
        raise StoreError(f"{path}: {error}") from None
    except PermissionError as error:
        raise StoreError(f"{path}: {error.strerror}") from None


def _connected_for_reading(path: Path) -> sqlite3.Connection:
    """A read-only connection to a database of autoflash, whichever of its versions made it."""
    _refuse_folder(path)
    if not path.is_file():
        raise StoreError(f"{path}: there is no such database")
    uri = readonly_uri(path, _must_be_immutable(path))
    conn = sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS, isolation_level=None)
    try:
        _when_free(lambda: _refuse_stranger(conn, path))
    except BaseException:
        conn.close()
        raise
    return conn


def _must_be_immutable(path: Path) -> bool:
    """Whether no -shm file, which reading in WAL mode needs, is beside or can be made.

    Then sqlite needs the word that nobody writes, and sees nothing of a -wal file: a warning.
    """
    shm, wal = (path.with_name(path.name + end) for end in ("-shm", "-wal"))
    if shm.is_file() or os.access(path.parent, os.W_OK):
        return False
    if wal.is_file() and wal.stat().st_size:
        warnings.warn(
            f"{path}: its folder cannot be written, so what is still in {wal.name} is not seen",
            StoreWarning,
            stacklevel=5,
        )
    return True


def _refuse_folder(path: Path) -> None:
    if path.is_dir():
        raise StoreError(f"{path}: is a folder, not a database")


def _refuse_stranger(conn: sqlite3.Connection, path: Path) -> None:
    """Raises StoreError if this is another program's database or a newer autoflash's."""
    db = Database(conn, execute_plugins=False)
    tables = db.table_names()  # looked at first: another process may be making ours right now
    applied = {migration.name for migration in MIGRATIONS.applied(db)}
    newer = sorted(applied - known_migrations())
    if newer:
        raise StoreError(f"{path}: written by a newer autoflash, which knows {newer[0]}")
    if tables and not applied:
        raise StoreError(f"{path}: is a database, but not one of autoflash")


def _when_free(step: Callable[[], Result]) -> Result:
    """What `step` gives, tried again for as long as others hold the file."""
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            return step()
        except sqlite3.OperationalError as error:
            # the low byte is the kind of error, the rest its detail
            busy = error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
            if not busy or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
