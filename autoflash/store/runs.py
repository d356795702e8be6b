"""Runs as flat rows: when, where, with what, and what came of their trials."""

from collections.abc import Iterator

from autoflash.store.reading import Row, rows
from autoflash.store.store import Store

RUNS_SQL = """
SELECT
  runs.id, gpus.name AS gpu, gpus.num_sms, gpus.memory_gib, gpus.power_limit_w,
  toolchains.driver, toolchains.cuda, toolchains.torch, toolchains.triton, toolchains.ptxas,
  runs.seed, runs.effort, runs.budget_s, runs.argv_json, runs.protocol, runs.locked_clock_mhz,
  runs.started_at, runs.ended_at, runs.outcome,
  count(DISTINCT trials.problem_id) AS problems, count(trials.id) AS trials,
  sum(trials.status <> 'correct') AS failed,
  min(trials.sm_clock_mhz) AS lowest_clock_mhz, max(trials.sm_clock_mhz) AS highest_clock_mhz,
  max(trials.temperature_c) AS highest_c, max(trials.power_w) AS highest_w
FROM runs
JOIN gpus ON gpus.id = runs.gpu_id
JOIN toolchains ON toolchains.id = runs.toolchain_id
LEFT JOIN trials ON trials.run_id = runs.id
GROUP BY runs.id
ORDER BY runs.id
"""


def run_rows(store: Store) -> Iterator[Row]:
    """Every run, oldest first."""
    return rows(store.conn, RUNS_SQL)
