"""What is written: rows found or made by their key, trials and decisions appended."""

import sqlite3
import uuid
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

from autoflash.config import Config
from autoflash.gpu import Gpu
from autoflash.problem import Problem
from autoflash.records import Decision, ExportedProblem, Profile, Trial, Winner
from autoflash.store.fields import Plain, to_plain
from autoflash.store.knobs import config_object, timed_object, to_json
from autoflash.toolchain import Toolchain

# Every function here is called inside `opening.transaction`.


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def insert(conn: sqlite3.Connection, table: str, values: dict[str, Plain]) -> int:
    """The id of the new row."""
    cursor = conn.execute(_insert_sql(table, values), list(values.values()))
    return cursor.lastrowid or 0


def find_or_insert(conn: sqlite3.Connection, table: str, key: dict[str, Plain]) -> int:
    """The id of the one row with this key."""
    where = " AND ".join(f"{name} = ?" for name in key)
    find = f"SELECT id FROM {table} WHERE {where}"
    found = conn.execute(find, list(key.values())).fetchone()
    return found[0] if found else insert(conn, table, key)


def gpu_id(conn: sqlite3.Connection, gpu: Gpu) -> int:
    return find_or_insert(conn, "gpus", to_plain(gpu))


def toolchain_id(conn: sqlite3.Connection, toolchain: Toolchain) -> int:
    return find_or_insert(conn, "toolchains", to_plain(toolchain))


def problem_id(conn: sqlite3.Connection, problem: Problem) -> int:
    return find_or_insert(conn, "problems", to_plain(problem))


def config_id(conn: sqlite3.Connection, config: Config) -> int:
    key: dict[str, Plain] = {"family": config.family, "knobs_json": to_json(config.as_dict())}
    return find_or_insert(conn, "configs", key)


def kernel_id(conn: sqlite3.Connection, family: str, digest: str) -> int:
    """Its text may come later, or never: winners that are loaded have none."""
    return find_or_insert(conn, "kernels", {"family": family, "digest": digest})


def add_kernel_text(
    conn: sqlite3.Connection, family: str, variant: str, digest: str, text: str
) -> None:
    row = kernel_id(conn, family, digest)
    conn.execute("UPDATE kernels SET variant = ?, text = ? WHERE id = ?", (variant, text, row))


def add_run(
    conn: sqlite3.Connection,
    gpu: Gpu,
    toolchain: Toolchain,
    *,
    seed: int,
    effort: str,
    budget_s: float | None,
    argv: list[str],
    protocol: str,
    locked_clock_mhz: int = 0,
    outcome: str = "",
) -> int:
    run = insert(
        conn,
        "runs",
        {
            "gpu_id": gpu_id(conn, gpu),
            "toolchain_id": toolchain_id(conn, toolchain),
            "seed": seed,
            "effort": effort,
            "budget_s": budget_s,
            "argv_json": to_json(argv),
            "protocol": protocol,
            "started_at": now(),
            "uid": uuid.uuid4().hex,
            "locked_clock_mhz": locked_clock_mhz,
        },
    )
    if outcome:
        finish_run(conn, run, outcome)
    return run


def finish_run(conn: sqlite3.Connection, run: int, outcome: str) -> None:
    conn.execute("UPDATE runs SET ended_at = ?, outcome = ? WHERE id = ?", (now(), outcome, run))


def add_run_problem(conn: sqlite3.Connection, run: int, problem: Problem, weight: float) -> None:
    """The weight of a problem in a run; said twice, the later holds."""
    conn.execute(
        "INSERT INTO run_problems (run_id, problem_id, weight) VALUES (?, ?, ?) "
        "ON CONFLICT DO UPDATE SET weight = excluded.weight",
        (run, problem_id(conn, problem), weight),
    )


def add_trial(conn: sqlite3.Connection, run: int, trial: Trial) -> int:
    values = to_plain(_without_nan(trial), finite=False)
    digest = str(values.pop("kernel_digest"))
    return insert(
        conn,
        "trials",
        {
            "run_id": run,
            "problem_id": problem_id(conn, trial.problem),
            "config_id": config_id(conn, trial.config),
            "kernel_id": kernel_id(conn, trial.config.family, digest),
            **values,
            **to_plain(trial.resources),
            **to_plain(trial.clocks),
            "recorded_at": now(),
        },
    )


def add_decision(
    conn: sqlite3.Connection, run: int, decision: Decision, decided_at: str = ""
) -> int:
    values = to_plain(decision)
    digest = str(values.pop("kernel_digest"))
    return insert(
        conn,
        "decisions",
        {
            "run_id": run,
            "problem_id": problem_id(conn, decision.problem),
            "kernel_id": kernel_id(conn, decision.winner.family, digest),
            "winner_config_id": config_id(conn, decision.winner),
            "default_config_id": config_id(conn, decision.default),
            **values,
            "tied_json": to_json([config_object(config) for config in decision.tied]),
            "times_json": to_json([timed_object(timed) for timed in decision.times]),
            "decided_at": decided_at or now(),
        },
    )


def add_winners(conn: sqlite3.Connection, winners: list[Winner], origin: str) -> None:
    """Decisions made elsewhere, under one run for each GPU, toolchain and source."""
    runs: dict[tuple[Gpu, Toolchain, str], int] = {}
    for winner in winners:
        key = (winner.gpu, winner.toolchain, winner.decision.source)
        if key not in runs:
            runs[key] = add_run(
                conn,
                winner.gpu,
                winner.toolchain,
                seed=0,
                effort="",
                budget_s=None,
                argv=["db", "load", origin],
                protocol="",
                outcome="loaded",
            )
        add_run_problem(conn, runs[key], winner.decision.problem, winner.weight)
        add_decision(conn, runs[key], winner.decision, winner.decided_at)


def add_export(
    conn: sqlite3.Connection,
    module_sha256: str,
    most_configs: int,
    exported: Sequence[ExportedProblem],
) -> int:
    """The id of the export, whose problems are stored with it."""
    export = insert(
        conn,
        "exports",
        {
            "uid": uuid.uuid4().hex,
            "module_sha256": module_sha256,
            "most_configs": most_configs,
            "exported_at": now(),
        },
    )
    for each in exported:
        insert(
            conn,
            "exported_problems",
            {
                "export_id": export,
                "gpu_id": gpu_id(conn, each.gpu),
                "toolchain_id": toolchain_id(conn, each.toolchain),
                "problem_id": problem_id(conn, each.problem),
                "config_id": config_id(conn, each.config),
                **to_plain(each),
            },
        )
    return export


def add_profiles(
    conn: sqlite3.Connection, winner: Winner, toolchain: Toolchain, profiles: Sequence[Profile]
) -> None:
    """What the kernels of a winner take with a toolchain, all of one moment."""
    decision, profiled_at = winner.decision, now()
    for profile in profiles:
        insert(
            conn,
            "profiles",
            {
                "gpu_id": gpu_id(conn, winner.gpu),
                "toolchain_id": toolchain_id(conn, toolchain),
                "problem_id": problem_id(conn, decision.problem),
                "config_id": config_id(conn, decision.winner),
                "kernel_id": kernel_id(conn, decision.winner.family, decision.kernel_digest),
                **to_plain(profile),
                "profiled_at": profiled_at,
            },
        )


def _without_nan(trial: Trial) -> Trial:
    """An error that is not a number is worse than any; sqlite would store it as NULL."""
    worst = {
        name: float("inf")
        for name in ("max_ratio", "rms_ratio", "lse_error")
        if getattr(trial, name) is not None and getattr(trial, name) != getattr(trial, name)
    }
    return replace(trial, **worst)


def _insert_sql(table: str, values: dict[str, Plain]) -> str:
    marks = ", ".join("?" * len(values))
    return f"INSERT INTO {table} ({', '.join(values)}) VALUES ({marks})"
