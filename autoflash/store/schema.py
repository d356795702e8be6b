"""The tables and views, as migrations; `tunedb/schema.sql` is printed from them."""

import sqlite3

from sqlite_utils import Database, Migrations

from autoflash.store.views import (
    FIRST_PROBLEM_COLUMNS,
    PROBLEM_COLUMNS,
    SECOND_PROBLEM_COLUMNS,
    anytime_view,
    standing_views,
)

MIGRATIONS = Migrations("autoflash")

# What has been released is never edited: a change is a new migration below. Columns that make a key
# are NOT NULL with a sentinel ("" or 0), for SQLite's UNIQUE lets NULLs repeat.
TABLES = (
    """
CREATE TABLE gpus (
  id INTEGER PRIMARY KEY,
  name TEXT NOT NULL,
  arch TEXT NOT NULL,
  num_sms INTEGER NOT NULL,
  memory_gib INTEGER NOT NULL,
  l2_bytes INTEGER NOT NULL,
  smem_per_block INTEGER NOT NULL,
  smem_per_sm INTEGER NOT NULL,
  registers_per_sm INTEGER NOT NULL,
  threads_per_sm INTEGER NOT NULL,
  mig_profile TEXT NOT NULL,
  power_limit_w INTEGER NOT NULL,
  dram_gbps INTEGER NOT NULL,
  tflops_16bit INTEGER NOT NULL,
  UNIQUE (
    name, arch, num_sms, memory_gib, mig_profile, power_limit_w, l2_bytes, smem_per_block,
    smem_per_sm, registers_per_sm, threads_per_sm, dram_gbps, tflops_16bit
  )
) STRICT
""",
    """
CREATE TABLE toolchains (
  id INTEGER PRIMARY KEY,
  driver TEXT NOT NULL,
  cuda TEXT NOT NULL,
  torch TEXT NOT NULL,
  triton TEXT NOT NULL,
  ptxas TEXT NOT NULL,
  fp_fusion INTEGER NOT NULL CHECK (fp_fusion IN (0, 1)),
  UNIQUE (driver, cuda, torch, triton, ptxas, fp_fusion)
) STRICT
""",
    # The text is for reading: what runs is rendered anew. It is "" where only winners were loaded.
    """
CREATE TABLE kernels (
  id INTEGER PRIMARY KEY,
  family TEXT NOT NULL,
  variant TEXT NOT NULL DEFAULT '',
  digest TEXT NOT NULL,
  text TEXT NOT NULL DEFAULT '',
  UNIQUE (family, digest)
) STRICT
""",
    """
CREATE TABLE problems (
  id INTEGER PRIMARY KEY,
  op TEXT NOT NULL,
  dtype TEXT NOT NULL,
  batch INTEGER NOT NULL,
  num_heads INTEGER NOT NULL,
  num_kv_heads INTEGER NOT NULL,
  head_dim INTEGER NOT NULL,
  seqlen_q INTEGER NOT NULL,
  seqlen_k INTEGER NOT NULL,
  causal INTEGER NOT NULL CHECK (causal IN (0, 1)),
  page_size INTEGER NOT NULL,
  layout TEXT NOT NULL,
  kv_layout TEXT NOT NULL,
  lengths TEXT NOT NULL,
  kv_dtype TEXT NOT NULL,
  out_dtype TEXT NOT NULL,
  acc_dtype TEXT NOT NULL,
  head_dim_v INTEGER NOT NULL,
  deterministic INTEGER NOT NULL CHECK (deterministic IN (0, 1)),
  batch_invariant INTEGER NOT NULL CHECK (batch_invariant IN (0, 1)),
  UNIQUE (
    op, dtype, head_dim, num_heads, num_kv_heads, batch, seqlen_q, seqlen_k, causal, page_size,
    layout, kv_layout, lengths, kv_dtype, out_dtype, acc_dtype, head_dim_v, deterministic,
    batch_invariant
  )
) STRICT
""",
    """
CREATE TABLE configs (
  id INTEGER PRIMARY KEY,
  family TEXT NOT NULL,
  knobs_json TEXT NOT NULL CHECK (json_valid(knobs_json)),
  UNIQUE (family, knobs_json)
) STRICT
""",
    """
CREATE TABLE runs (
  id INTEGER PRIMARY KEY,
  gpu_id INTEGER NOT NULL REFERENCES gpus (id),
  toolchain_id INTEGER NOT NULL REFERENCES toolchains (id),
  seed INTEGER NOT NULL,
  effort TEXT NOT NULL,
  budget_s REAL,
  argv_json TEXT NOT NULL CHECK (json_valid(argv_json)),
  protocol TEXT NOT NULL,
  started_at TEXT NOT NULL,
  ended_at TEXT NOT NULL DEFAULT '',
  outcome TEXT NOT NULL DEFAULT ''
) STRICT
""",
    """
CREATE TABLE run_problems (
  run_id INTEGER NOT NULL REFERENCES runs (id),
  problem_id INTEGER NOT NULL REFERENCES problems (id),
  weight REAL NOT NULL,
  PRIMARY KEY (run_id, problem_id)
) STRICT
""",
    """
CREATE TABLE trials (
  id INTEGER PRIMARY KEY,
  run_id INTEGER NOT NULL REFERENCES runs (id),
  problem_id INTEGER NOT NULL REFERENCES problems (id),
  config_id INTEGER NOT NULL REFERENCES configs (id),
  kernel_id INTEGER NOT NULL REFERENCES kernels (id),
  status TEXT NOT NULL CHECK (
    status IN ('correct', 'constraints', 'compile', 'runtime', 'correctness', 'timeout')
  ),
  stage TEXT NOT NULL CHECK (stage IN ('screen', 'final', 'cross', 'predicted')),
  source TEXT NOT NULL CHECK (source IN ('measured', 'predicted')),
  regime TEXT NOT NULL CHECK (regime IN ('graph', 'eager', 'none')),
  median_us REAL,
  p20_us REAL,
  p80_us REAL,
  samples INTEGER NOT NULL,
  max_ratio REAL,
  rms_ratio REAL,
  lse_error REAL,
  seconds REAL NOT NULL,
  error TEXT NOT NULL,
  registers INTEGER,
  spill_bytes INTEGER,
  smem_bytes INTEGER,
  launches_per_call INTEGER,
  workspace_bytes INTEGER,
  sm_clock_mhz INTEGER,
  memory_clock_mhz INTEGER,
  power_w REAL,
  temperature_c INTEGER,
  throttle_reasons INTEGER,
  recorded_at TEXT NOT NULL,
  CHECK (regime <> 'none' OR median_us IS NULL)
) STRICT
""",
    "CREATE INDEX trials_by_problem ON trials (problem_id, run_id, config_id)",
    "CREATE INDEX trials_by_run ON trials (run_id)",
    """
CREATE TABLE decisions (
  id INTEGER PRIMARY KEY,
  run_id INTEGER NOT NULL REFERENCES runs (id),
  problem_id INTEGER NOT NULL REFERENCES problems (id),
  kernel_id INTEGER NOT NULL REFERENCES kernels (id),
  winner_config_id INTEGER NOT NULL REFERENCES configs (id),
  default_config_id INTEGER NOT NULL REFERENCES configs (id),
  winner_us REAL NOT NULL,
  default_us REAL NOT NULL,
  margin REAL NOT NULL,
  margin_low REAL NOT NULL,
  margin_high REAL NOT NULL,
  regret REAL NOT NULL,
  source TEXT NOT NULL CHECK (source IN ('measured', 'predicted')),
  tied_json TEXT NOT NULL CHECK (json_valid(tied_json)),
  times_json TEXT NOT NULL CHECK (json_valid(times_json)),
  decided_at TEXT NOT NULL
) STRICT
""",
    "CREATE INDEX decisions_by_problem ON decisions (problem_id, run_id)",
    "CREATE INDEX decisions_by_run ON decisions (run_id)",
)


@MIGRATIONS()
def m001_tables_and_views(db: Database) -> None:
    for statement in (*TABLES, *standing_views(FIRST_PROBLEM_COLUMNS)):
        db.execute(statement.strip())


RUN_ADDITIONS = (
    # What makes a run the same run in a copy of its database; "" in those made before.
    "ALTER TABLE runs ADD COLUMN uid TEXT NOT NULL DEFAULT ''",
    # 0 where the clocks were left alone.
    "ALTER TABLE runs ADD COLUMN locked_clock_mhz INTEGER NOT NULL DEFAULT 0",
)


@MIGRATIONS()
def m002_runs_told_apart_and_anytime(db: Database) -> None:
    for statement in (*RUN_ADDITIONS, anytime_view(FIRST_PROBLEM_COLUMNS)):
        db.execute(statement.strip())


# The problems of before had caches of the queries' type, and tables in random order.
QUANTISED_AND_PAGES = """,
  CASE WHEN page_size > 0 THEN 'permuted' ELSE 'none' END AS pages, 'none' AS kv_scales"""


@MIGRATIONS()
def m003_quantised_caches_and_page_order(db: Database) -> None:
    more = "  pages TEXT NOT NULL,\n  kv_scales TEXT NOT NULL,\n"
    names = "batch_invariant, pages, kv_scales"
    _remake_problems(db, more, "batch_invariant", names, QUANTISED_AND_PAGES)
    for statement in (
        *standing_views(SECOND_PROBLEM_COLUMNS),
        anytime_view(SECOND_PROBLEM_COLUMNS),
    ):
        db.execute(statement.strip())


def _remake_problems(db: Database, more: str, last: str, names: str, values: str) -> None:
    """Add columns to the key of problems: SQLite cannot, so the table is made anew.

    `names` stand for the `last` of the key's names, `values` are of the rows there are. The views
    of problems are dropped.
    """
    db.execute("PRAGMA defer_foreign_keys=ON")  # what refers to problems is right again at the end
    for view in ("winners", "leaderboard", "anytime"):
        db.execute(f"DROP VIEW {view}")
    before = db.execute("SELECT sql FROM sqlite_master WHERE name = 'problems'").fetchone()[0]
    columns, _, unique = before.partition("  UNIQUE (")
    db.execute(f"CREATE TEMP TABLE old_problems AS SELECT *{values} FROM problems")
    db.execute("DROP TABLE problems")
    db.execute(f"{columns}{more}  UNIQUE ({unique.replace(last, names)}")
    db.execute("INSERT INTO problems SELECT * FROM old_problems")
    db.execute("DROP TABLE old_problems")


WHEN_COMPILED = (
    # "" where an earlier run had compiled it, and in trials made before these columns.
    "ALTER TABLE trials ADD COLUMN asked_at TEXT NOT NULL DEFAULT ''",
    "ALTER TABLE trials ADD COLUMN compiled_at TEXT NOT NULL DEFAULT ''",
    # Seconds since the run's start. `waited_s`: for how long since the trial before it was recorded
    # the GPU of the search had nothing to do, for want of this binary.
    """
CREATE VIEW timeline AS
WITH timed AS (
  SELECT
    trials.*,
    (julianday(nullif(asked_at, '')) - julianday(runs.started_at)) * 86400.0 AS asked_s,
    (julianday(nullif(compiled_at, '')) - julianday(runs.started_at)) * 86400.0 AS compiled_s,
    (julianday(recorded_at) - julianday(runs.started_at)) * 86400.0 AS ended_s
  FROM trials
  JOIN runs ON runs.id = trials.run_id
)
SELECT
  timed.run_id, timed.id AS trial_id, timed.problem_id, configs.family, configs.knobs_json,
  timed.stage, timed.regime, timed.status,
  round(asked_s, 3) AS asked_s, round(compiled_s, 3) AS compiled_s,
  round(ended_s - timed.seconds, 3) AS began_s, round(ended_s, 3) AS ended_s,
  round(max(0.0, compiled_s - lag(ended_s) OVER of_run), 3) AS waited_s
FROM timed
JOIN configs ON configs.id = timed.config_id
WINDOW of_run AS (PARTITION BY timed.run_id ORDER BY timed.id)
""",
)


@MIGRATIONS()
def m004_when_trials_were_compiled(db: Database) -> None:
    for statement in WHEN_COMPILED:
        db.execute(statement.strip())


MODIFIERS = ("softcap", "alibi", "bias", "sinks")
WINDOWS_AND_MODIFIERS = "".join(
    [f"  {side} INTEGER NOT NULL,\n" for side in ("window_left", "window_right")]
    + [f"  {name} INTEGER NOT NULL CHECK ({name} IN (0, 1)),\n" for name in MODIFIERS]
)


@MIGRATIONS()
def m005_windows_and_modifiers(db: Database) -> None:
    """The problems of before had none."""
    names = "kv_scales,\n    window_left, window_right, softcap, alibi, bias, sinks"
    _remake_problems(db, WINDOWS_AND_MODIFIERS, "kv_scales", names, ", -1, -1, 0, 0, 0, 0")
    for statement in (*standing_views(PROBLEM_COLUMNS), anytime_view(PROBLEM_COLUMNS)):
        db.execute(statement.strip())


def known_migrations() -> set[str]:
    """The names of every migration of this program."""
    with Database(memory=True) as empty:
        return {migration.name for migration in MIGRATIONS.pending(empty)}


def schema_sql() -> str:
    """The schema that all migrations together make, as SQL."""
    with Database(sqlite3.connect(":memory:")) as db:
        MIGRATIONS.apply(db)
        rows = db.execute(
            "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL AND tbl_name NOT LIKE '\\_%' "
            "ESCAPE '\\' ORDER BY rowid"
        ).fetchall()
    return "\n\n".join(f"{sql};" for (sql,) in rows) + "\n"
