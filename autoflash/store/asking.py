"""A question in SQL: one SELECT of a user's, which can read the database and nothing else."""

import sqlite3
from typing import Any

from autoflash.errors import StoreError

READING = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}


def ask(conn: sqlite3.Connection, sql: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    """The names and the rows that one SELECT gives. Raises StoreError with sqlite's reason.

    A read-only connection would still let ATTACH make another file; the authorizer does not.
    """
    conn.set_authorizer(
        lambda action, *_: sqlite3.SQLITE_OK if action in READING else sqlite3.SQLITE_DENY
    )
    try:
        cursor = conn.execute(sql)
        if cursor.description is None:
            raise StoreError("--sql: there is no statement in it")
        return [column[0] for column in cursor.description], cursor.fetchall()
    except sqlite3.DatabaseError as error:
        denied = getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_AUTH
        raise StoreError(f"--sql: {'only SELECT is allowed' if denied else error}") from None
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
        raise StoreError(f"--sql: {error}") from None
    finally:
        conn.set_authorizer(None)
