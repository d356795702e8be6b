"""What is read: trials and winners as records, those that cannot be are skipped."""

import json
import sqlite3
from collections.abc import Iterator, Mapping
from typing import Any

from autoflash.gpu import Gpu
from autoflash.problem import Problem
from autoflash.records import SOURCES, STATUSES, Clocks, Decision, Resources, Trial, Winner
from autoflash.store.fields import from_plain, plain_fields, to_plain
from autoflash.store.knobs import objects, read_config, read_config_object, read_timed_object
from autoflash.store.schema import PROBLEM_COLUMNS, RUN_COLUMNS
from autoflash.store.skipping import readable
from autoflash.toolchain import Toolchain

Row = dict[str, Any]

TRIALS_SQL = f"""
SELECT
  trials.*, configs.family, configs.knobs_json, kernels.digest AS kernel_digest,
  {RUN_COLUMNS.strip()},{PROBLEM_COLUMNS}
FROM trials
JOIN runs ON runs.id = trials.run_id
JOIN gpus ON gpus.id = runs.gpu_id
JOIN toolchains ON toolchains.id = runs.toolchain_id
JOIN problems ON problems.id = trials.problem_id
JOIN configs ON configs.id = trials.config_id
JOIN kernels ON kernels.id = trials.kernel_id
"""

DECISIONS_SQL = f"""
SELECT
  decisions.run_id, decisions.winner_us, decisions.source, decisions.decided_at,
  configs.family, configs.knobs_json,
  {RUN_COLUMNS.strip()},{PROBLEM_COLUMNS}
FROM decisions
JOIN runs ON runs.id = decisions.run_id
JOIN gpus ON gpus.id = runs.gpu_id
JOIN toolchains ON toolchains.id = runs.toolchain_id
JOIN problems ON problems.id = decisions.problem_id
JOIN configs ON configs.id = decisions.winner_config_id
ORDER BY decisions.decided_at, decisions.id
"""

IDENTITY_COLUMNS = ("name", "arch", "num_sms", "memory_gib", "mig_profile")


def trials_of(
    conn: sqlite3.Connection,
    where: str,
    gpu: Gpu,
    toolchain: Toolchain,
    problem: Problem | None,
    kernel_digest: str | None,
) -> list[Trial]:
    """The trials of this GPU identity and this toolchain, oldest first."""
    wanted = {
        **{f"gpus.{n}": v for n, v in zip(IDENTITY_COLUMNS, gpu.identity, strict=True)},
        **{f"toolchains.{name}": value for name, value in to_plain(toolchain).items()},
    }
    if problem is not None:
        wanted |= {f"problems.{name}": value for name, value in to_plain(problem).items()}
    if kernel_digest is not None:
        wanted["kernels.digest"] = kernel_digest
    condition = " AND ".join(f"{column} = ?" for column in wanted)
    sql = f"{TRIALS_SQL}WHERE {condition} ORDER BY trials.id"
    return readable(rows(conn, sql, list(wanted.values())), _read_trial, where)


def winners_of(
    conn: sqlite3.Connection, where: str, gpu: Gpu | None, problem: Problem | None
) -> list[Winner]:
    """The latest decision per GPU identity, toolchain, problem and source, in `winner_order`."""
    gpus = {row.pop("id"): row for row in rows(conn, "SELECT * FROM gpus")}
    wanted: dict[str, Any] = {}
    if gpu is not None:
        wanted |= zip(("gpu", *IDENTITY_COLUMNS[1:]), gpu.identity, strict=True)
    if problem is not None:
        wanted |= to_plain(problem)
    condition = " AND ".join(f"{column} = ?" for column in wanted) or "true"
    found = rows(conn, f"SELECT * FROM winners WHERE {condition}", list(wanted.values()))
    winners = readable(found, lambda row: _read_winner(row, gpus[row["gpu_id"]]), where)
    return sorted(winners, key=winner_order)


def anytime_of(conn: sqlite3.Connection, run_id: int) -> dict[Problem, list[tuple[float, float]]]:
    """The points of each problem's curve, in the order they were made."""
    curves: dict[Problem, list[tuple[float, float]]] = {}
    for row in rows(conn, "SELECT * FROM anytime WHERE run_id = ? ORDER BY trial_id", [run_id]):
        problem = from_plain(Problem, _fields_of(Problem, row))
        curves.setdefault(problem, []).append((row["elapsed_s"], row["best_us"]))
    return curves


def winner_order(winner: Winner) -> tuple[Any, ...]:
    """By GPU and problem; measured before predicted; then by toolchain and date."""
    decision = winner.decision
    predicted = decision.source != "measured"
    identity = winner.gpu.identity
    return (identity, decision.problem, predicted, winner.toolchain, winner.decided_at)


def rows(conn: sqlite3.Connection, sql: str, values: list[Any] | None = None) -> Iterator[Row]:
    cursor = conn.execute(sql, values or [])
    names = [column[0] for column in cursor.description]
    return (dict(zip(names, row, strict=True)) for row in cursor)


def one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Raises ValueError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}, none of {', '.join(allowed)}")


def _read_trial(row: Row) -> Trial:
    one_of("status", row["status"], STATUSES)
    one_of("source", row["source"], SOURCES)
    return from_plain(
        Trial,
        _fields_of(Trial, row),
        finite=False,
        problem=from_plain(Problem, _fields_of(Problem, row)),
        config=read_config(row["family"], _json(row["knobs_json"])),
        resources=from_plain(Resources, _fields_of(Resources, row)),
        clocks=from_plain(Clocks, _fields_of(Clocks, row)),
    )


def _read_winner(row: Row, gpu: Row) -> Winner:
    one_of("source", row["source"], SOURCES)
    tied, times = _json(row["tied_json"]), _json(row["times_json"])
    decision = from_plain(
        Decision,
        _fields_of(Decision, row),
        problem=from_plain(Problem, _fields_of(Problem, row)),
        winner=read_config(row["family"], _json(row["knobs_json"])),
        default=read_config(row["default_family"], _json(row["default_knobs_json"])),
        tied=tuple(read_config_object(config) for config in objects(tied)),
        times=tuple(read_timed_object(timed) for timed in objects(times)),
    )
    return from_plain(
        Winner,
        _fields_of(Winner, row),
        gpu=from_plain(Gpu, gpu),
        toolchain=from_plain(Toolchain, _fields_of(Toolchain, row)),
        decision=decision,
    )


def _fields_of(record_type: type, row: Mapping[str, Any]) -> Row:
    return {name: row[name] for name in plain_fields(record_type)}


def _json(text: Any) -> Any:
    """Raises ValueError for what is not JSON text."""
    if not isinstance(text, str):
        raise ValueError(f"{text!r} is not JSON")
    return json.loads(text)
