"""Merging databases into one: every row is kept, and what both have is there once."""

import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoflash.store.opening import snapshot, told, transaction
from autoflash.store.store import Store
from autoflash.store.writing import find_or_insert, insert

Row = dict[str, Any]
Ids = dict[int, int]  # of a row in the input, of the same row in the output

# A row of these is the same row where the key is the same; "" of a kernel is no text yet.
KEYS: dict[str, tuple[str, ...]] = {
    "gpus": (),  # all columns
    "toolchains": (),
    "problems": (),
    "configs": (),
    "kernels": ("family", "digest"),
    "exports": (),  # their uid among them
}
# A run may have gone on since it was copied, so its end is no part of it.
END_OF_RUN = ("ended_at", "outcome")
MADE_IN_RUNS = ("trials", "decisions")
REFERENCES = {
    "gpu_id": "gpus",
    "toolchain_id": "toolchains",
    "run_id": "runs",
    "problem_id": "problems",
    "config_id": "configs",
    "winner_config_id": "configs",
    "default_config_id": "configs",
    "kernel_id": "kernels",
    "export_id": "exports",
}
MADE_ONCE = (
    "run_problems",
    "exported_problems",
    "profiles",
)  # told apart by their primary key alone


@dataclass(frozen=True)
class Merged:
    """What one database brought that the output had not."""

    path: Path
    runs: int
    trials: int
    decisions: int


def merge(paths: Sequence[Path], output: Path) -> list[Merged]:
    """Add every row of the databases at `paths` to the one at `output`, made if need be.

    A run of an input is the run of the output with the same uid (one made before runs had uids:
    with the same columns, and as many such before it). Of it the rows are added that the output
    lacks, so a database merged twice, or once more when it has grown, brings only what is new.
    Which decision is the winner is asked of all of them as ever: the latest; of two of the same
    moment, that of the later path. All inputs are read before anything is written, and all are
    added or, where something fails, none. Raises StoreError.
    """
    made = not output.exists()
    with ExitStack() as stack:
        inputs = [stack.enter_context(snapshot(path)) for path in paths]
        try:
            store = stack.enter_context(Store.open(output))
            with told(store.path), transaction(store.conn):
                return [
                    _add(rows, store.conn, path) for path, rows in zip(paths, inputs, strict=True)
                ]
        except BaseException:
            stack.close()
            if made:  # nothing is half-written
                for end in ("", "-wal", "-shm"):
                    output.with_name(output.name + end).unlink(missing_ok=True)
            raise


def _add(source: sqlite3.Connection, target: sqlite3.Connection, path: Path) -> Merged:
    ids: dict[str, Ids] = {}
    for table, key in KEYS.items():
        ids[table] = {}
        for row_id, row in _rows(source, table):
            wanted = {name: row[name] for name in key} if key else row
            ids[table][row_id] = find_or_insert(target, table, wanted)
            if table == "kernels" and row["text"]:
                target.execute(
                    "UPDATE kernels SET variant = ?, text = ? WHERE id = ? AND text = ''",
                    (row["variant"], row["text"], ids[table][row_id]),
                )
    ids["runs"], new_runs = _runs(source, target, ids)
    for table in MADE_ONCE:
        for row in _plain_rows(source, table):
            marks = ", ".join("?" * len(row))
            target.execute(
                f"INSERT OR IGNORE INTO {table} ({', '.join(row)}) VALUES ({marks})",
                list(_here(row, ids).values()),
            )
    added = {table: _made(source, target, table, ids) for table in MADE_IN_RUNS}
    return Merged(path, new_runs, added["trials"], added["decisions"])


def _runs(
    source: sqlite3.Connection, target: sqlite3.Connection, ids: dict[str, Ids]
) -> tuple[Ids, int]:
    """The runs' ids in the output, and how many of them are new there."""
    there: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
    for row_id, row in _rows(target, "runs"):
        there[_identity(row)].append(row_id)
    met: Counter[tuple[Any, ...]] = Counter()
    found: Ids = {}
    new = 0
    for row_id, row in _rows(source, "runs"):
        row = _here(row, ids)
        identity = _identity(row)
        place = met[identity]
        met[identity] += 1
        if place < len(there[identity]):
            found[row_id] = there[identity][place]
            target.execute(
                "UPDATE runs SET ended_at = ?, outcome = ? WHERE id = ? AND ended_at = ''",
                (row["ended_at"], row["outcome"], found[row_id]),
            )
        else:
            found[row_id] = insert(target, "runs", row)
            new += 1
    return found, new


def _identity(run: Row) -> tuple[Any, ...]:
    """What makes it the same run: its uid, and all else for runs that have none."""
    return tuple(value for name, value in run.items() if name not in END_OF_RUN)


def _made(
    source: sqlite3.Connection, target: sqlite3.Connection, table: str, ids: dict[str, Ids]
) -> int:
    """How many trials or decisions were new, in the order they were made in.

    Two rows of a run that are equal in everything are two: as many as either has are kept.
    """
    runs = set(ids["runs"].values())
    known = Counter(tuple(row.values()) for _, row in _rows(target, table) if row["run_id"] in runs)
    new = 0
    for _, row in _rows(source, table):
        row = _here(row, ids)
        values = tuple(row.values())
        if known[values]:
            known[values] -= 1
        else:
            insert(target, table, row)
            new += 1
    return new


def _here(row: Row, ids: dict[str, Ids]) -> Row:
    """The row with the ids that the rows it refers to have in the output."""
    return {
        name: ids[REFERENCES[name]][value] if name in REFERENCES else value
        for name, value in row.items()
    }


def _rows(conn: sqlite3.Connection, table: str) -> Iterator[tuple[int, Row]]:
    """The rows in the order they were made, each with its id apart."""
    for row in _plain_rows(conn, table, "ORDER BY id"):
        yield row.pop("id"), row


def _plain_rows(conn: sqlite3.Connection, table: str, order: str = "") -> Iterator[Row]:
    cursor = conn.execute(f"SELECT * FROM {table} {order}")
    names = [column[0] for column in cursor.description]
    return (dict(zip(names, row, strict=True)) for row in cursor.fetchall())
