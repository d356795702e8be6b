"""The tables and views, as migrations; `tunedb/schema.sql` is printed from them."""

import sqlite3

from sqlite_utils import Database, Migrations

from autoflash.store.first_tables import TABLES

# What has been released is never edited: a change is a new migration below.
MIGRATIONS = Migrations("autoflash")

RUN_COLUMNS = """
  gpus.name AS gpu, gpus.arch, gpus.num_sms, gpus.memory_gib, gpus.mig_profile,
  toolchains.driver, toolchains.cuda, toolchains.torch, toolchains.triton, toolchains.ptxas,
  toolchains.fp_fusion"""

FIRST_PROBLEM_COLUMNS = """
  problems.op, problems.dtype, problems.batch, problems.num_heads, problems.num_kv_heads,
  problems.head_dim, problems.seqlen_q, problems.seqlen_k, problems.causal, problems.page_size,
  problems.layout, problems.kv_layout, problems.lengths, problems.kv_dtype, problems.out_dtype,
  problems.acc_dtype, problems.head_dim_v, problems.deterministic, problems.batch_invariant"""
SECOND_PROBLEM_COLUMNS = f"""{FIRST_PROBLEM_COLUMNS},
  problems.pages, problems.kv_scales"""
THIRD_PROBLEM_COLUMNS = f"""{SECOND_PROBLEM_COLUMNS},
  problems.window_left, problems.window_right, problems.softcap, problems.alibi, problems.bias,
  problems.sinks"""
FOURTH_PROBLEM_COLUMNS = f"""{THIRD_PROBLEM_COLUMNS},
  problems.mask, problems.masked_by, problems.density, problems.mask_block_q,
  problems.mask_block_k"""
PROBLEM_COLUMNS = f"""{FOURTH_PROBLEM_COLUMNS}, problems.dropout"""


def _views(problem_columns: str) -> tuple[str, ...]:
    return (
        # The latest decision of each GPU identity, toolchain, problem and source.
        f"""
CREATE VIEW winners AS
WITH ranked AS (
  SELECT
    decisions.*,
    row_number() OVER (
      PARTITION BY
        gpus.name, gpus.arch, gpus.num_sms, gpus.memory_gib, gpus.mig_profile,
        runs.toolchain_id, decisions.problem_id, decisions.source
      ORDER BY decisions.decided_at DESC, decisions.id DESC
    ) AS age
  FROM decisions
  JOIN runs ON runs.id = decisions.run_id
  JOIN gpus ON gpus.id = runs.gpu_id
)
SELECT
  ranked.id AS decision_id, ranked.run_id, runs.gpu_id,{RUN_COLUMNS},{problem_columns},
  winner.family, winner.knobs_json, kernels.digest AS kernel_digest,
  ranked.winner_us, fallback.family AS default_family, fallback.knobs_json AS default_knobs_json,
  ranked.default_us, ranked.margin, ranked.margin_low, ranked.margin_high, ranked.regret,
  ranked.source, ranked.tied_json, ranked.times_json,
  coalesce(run_problems.weight, 1.0) AS weight, ranked.decided_at
FROM ranked
JOIN runs ON runs.id = ranked.run_id
JOIN gpus ON gpus.id = runs.gpu_id
JOIN toolchains ON toolchains.id = runs.toolchain_id
JOIN problems ON problems.id = ranked.problem_id
JOIN kernels ON kernels.id = ranked.kernel_id
JOIN configs AS winner ON winner.id = ranked.winner_config_id
JOIN configs AS fallback ON fallback.id = ranked.default_config_id
LEFT JOIN run_problems
  ON run_problems.run_id = ranked.run_id AND run_problems.problem_id = ranked.problem_id
WHERE ranked.age = 1
""",
        # The best time of every config that was measured and correct, ranked within its problem.
        f"""
CREATE VIEW leaderboard AS
WITH best AS (
  SELECT
    runs.gpu_id, runs.toolchain_id, trials.problem_id, trials.config_id, trials.kernel_id,
    min(trials.median_us) AS best_us, count(*) AS trials
  FROM trials
  JOIN runs ON runs.id = trials.run_id
  WHERE trials.status = 'correct' AND trials.source = 'measured' AND trials.regime = 'graph'
    AND trials.median_us IS NOT NULL
  GROUP BY
    runs.gpu_id, runs.toolchain_id, trials.problem_id, trials.config_id, trials.kernel_id
)
SELECT
  rank() OVER (
    PARTITION BY best.gpu_id, best.toolchain_id, best.problem_id ORDER BY best.best_us
  ) AS place,
  best.best_us, best.trials, configs.family, configs.knobs_json, kernels.digest AS kernel_digest,
  {RUN_COLUMNS.strip()},{problem_columns}
FROM best
JOIN gpus ON gpus.id = best.gpu_id
JOIN toolchains ON toolchains.id = best.toolchain_id
JOIN problems ON problems.id = best.problem_id
JOIN configs ON configs.id = best.config_id
JOIN kernels ON kernels.id = best.kernel_id
""",
    )


@MIGRATIONS()
def m001_tables_and_views(db: Database) -> None:
    for statement in (*TABLES, *_views(FIRST_PROBLEM_COLUMNS)):
        db.execute(statement.strip())


RUN_ADDITIONS = (
    # What makes a run the same run in a copy of its database; "" in those made before.
    "ALTER TABLE runs ADD COLUMN uid TEXT NOT NULL DEFAULT ''",
    # 0 where the clocks were left alone.
    "ALTER TABLE runs ADD COLUMN locked_clock_mhz INTEGER NOT NULL DEFAULT 0",
)


def _anytime_view(problem_columns: str) -> str:
    # Every trial of a run that was faster than all before it on its problem.
    return f"""
CREATE VIEW anytime AS
WITH timed AS (
  SELECT
    trials.*,
    round((julianday(trials.recorded_at) - julianday(runs.started_at)) * 86400.0, 3) AS elapsed_s,
    min(trials.median_us) OVER (
      PARTITION BY trials.run_id, trials.problem_id ORDER BY trials.id
      ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
    ) AS before_us
  FROM trials
  JOIN runs ON runs.id = trials.run_id
  WHERE trials.status = 'correct' AND trials.source = 'measured' AND trials.regime = 'graph'
    AND trials.stage IN ('screen', 'final') AND trials.median_us IS NOT NULL
)
SELECT
  timed.run_id, timed.id AS trial_id, timed.elapsed_s, timed.median_us AS best_us,
  configs.family, configs.knobs_json,{problem_columns}
FROM timed
JOIN problems ON problems.id = timed.problem_id
JOIN configs ON configs.id = timed.config_id
WHERE timed.before_us IS NULL OR timed.median_us < timed.before_us
"""


@MIGRATIONS()
def m002_runs_told_apart_and_anytime(db: Database) -> None:
    for statement in (*RUN_ADDITIONS, _anytime_view(FIRST_PROBLEM_COLUMNS)):
        db.execute(statement.strip())


# The problems of before had caches of the queries' type, and tables in random order.
QUANTISED_AND_PAGES = """,
  CASE WHEN page_size > 0 THEN 'permuted' ELSE 'none' END AS pages, 'none' AS kv_scales"""


@MIGRATIONS()
def m003_quantised_caches_and_page_order(db: Database) -> None:
    columns = "  pages TEXT NOT NULL,\n  kv_scales TEXT NOT NULL,\n"
    names = "batch_invariant, pages, kv_scales"
    _remake_problems(db, columns, ("batch_invariant", names), QUANTISED_AND_PAGES)
    for statement in (*_views(SECOND_PROBLEM_COLUMNS), _anytime_view(SECOND_PROBLEM_COLUMNS)):
        db.execute(statement.strip())


def _remake_problems(db: Database, columns: str, key: tuple[str, str], values: str) -> None:
    """Add `columns` to the table of problems, and drop its views.

    SQLite cannot add to a UNIQUE constraint, so the table is made anew. `key` is the last name of
    the constraint and what stands there instead, `values` those of the rows that there are.
    """
    db.execute("PRAGMA defer_foreign_keys=ON")  # what refers to problems is right again at the end
    for view in ("winners", "leaderboard", "anytime"):
        db.execute(f"DROP VIEW {view}")
    before = db.execute("SELECT sql FROM sqlite_master WHERE name = 'problems'").fetchone()[0]
    held, _, unique = before.partition("  UNIQUE (")
    db.execute(f"CREATE TEMP TABLE old_problems AS SELECT *{values} FROM problems")
    db.execute("DROP TABLE problems")
    db.execute(f"{held}{columns}  UNIQUE ({unique.replace(*key)}")
    db.execute("INSERT INTO problems SELECT * FROM old_problems")
    db.execute("DROP TABLE old_problems")


WHEN_COMPILED = (
    # "" in trials made before these columns.
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


EXPORTS = (
    """
CREATE TABLE exports (
  id INTEGER PRIMARY KEY,
  uid TEXT NOT NULL UNIQUE,
  module_sha256 TEXT NOT NULL,
  most_configs INTEGER NOT NULL,
  exported_at TEXT NOT NULL
) STRICT
""",
    # Regrets against the problem's best measured time; `unseen_regret` had it not been tuned.
    """
CREATE TABLE exported_problems (
  export_id INTEGER NOT NULL REFERENCES exports (id),
  gpu_id INTEGER NOT NULL REFERENCES gpus (id),
  toolchain_id INTEGER NOT NULL REFERENCES toolchains (id),
  problem_id INTEGER NOT NULL REFERENCES problems (id),
  config_id INTEGER NOT NULL REFERENCES configs (id),
  source TEXT NOT NULL CHECK (source IN ('measured', 'predicted')),
  regret REAL NOT NULL,
  unseen_regret REAL,
  PRIMARY KEY (export_id, gpu_id, toolchain_id, problem_id)
) STRICT
""",
)


@MIGRATIONS()
def m005_what_was_exported(db: Database) -> None:
    for statement in EXPORTS:
        db.execute(statement.strip())


WINDOWS_AND_MODIFIERS = """  window_left INTEGER NOT NULL,
  window_right INTEGER NOT NULL,
  softcap INTEGER NOT NULL CHECK (softcap IN (0, 1)),
  alibi INTEGER NOT NULL CHECK (alibi IN (0, 1)),
  bias INTEGER NOT NULL CHECK (bias IN (0, 1)),
  sinks INTEGER NOT NULL CHECK (sinks IN (0, 1)),
"""


@MIGRATIONS()
def m006_windows_and_modifiers(db: Database) -> None:
    """The problems of before had none."""
    names = "kv_scales, window_left,\n    window_right, softcap, alibi, bias, sinks"
    _remake_problems(db, WINDOWS_AND_MODIFIERS, ("kv_scales", names), ", -1, -1, 0, 0, 0, 0")
    for statement in (*_views(THIRD_PROBLEM_COLUMNS), _anytime_view(THIRD_PROBLEM_COLUMNS)):
        db.execute(statement.strip())


# What a profiler saw of a kernel of a config; NULL where there was none.
PROFILES = """
CREATE TABLE profiles (
  gpu_id INTEGER NOT NULL REFERENCES gpus (id),
  toolchain_id INTEGER NOT NULL REFERENCES toolchains (id),
  problem_id INTEGER NOT NULL REFERENCES problems (id),
  config_id INTEGER NOT NULL REFERENCES configs (id),
  kernel_id INTEGER NOT NULL REFERENCES kernels (id),
  kernel TEXT NOT NULL,
  registers INTEGER NOT NULL,
  spill_bytes INTEGER NOT NULL,
  smem_bytes INTEGER NOT NULL,
  warps INTEGER NOT NULL,
  programs INTEGER NOT NULL,
  occupancy_percent REAL NOT NULL,
  achieved_percent REAL,
  dram_percent REAL,
  tensor_percent REAL,
  profiled_at TEXT NOT NULL,
  PRIMARY KEY (gpu_id, toolchain_id, problem_id, config_id, kernel_id, kernel, profiled_at)
) STRICT
"""


@MIGRATIONS()
def m007_profiles(db: Database) -> None:
    db.execute(PROFILES.strip())


MASKS = """  mask TEXT NOT NULL,
  masked_by TEXT NOT NULL,
  density INTEGER NOT NULL,
  mask_block_q INTEGER NOT NULL,
  mask_block_k INTEGER NOT NULL,
"""


@MIGRATIONS()
def m008_masks(db: Database) -> None:
    """The problems of before had none."""
    names = "bias, sinks, mask, masked_by,\n    density, mask_block_q, mask_block_k"
    _remake_problems(db, MASKS, ("bias, sinks", names), ", '', 'none', 0, 0, 0")
    for statement in (*_views(FOURTH_PROBLEM_COLUMNS), _anytime_view(FOURTH_PROBLEM_COLUMNS)):
        db.execute(statement.strip())


DROPOUT = "  dropout INTEGER NOT NULL CHECK (dropout IN (0, 1)),\n"


@MIGRATIONS()
def m009_dropout(db: Database) -> None:
    """The problems of before had none."""
    _remake_problems(db, DROPOUT, ("mask_block_k\n", "mask_block_k, dropout\n"), ", 0")
    for statement in (*_views(PROBLEM_COLUMNS), _anytime_view(PROBLEM_COLUMNS)):
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
