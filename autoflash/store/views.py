"""The views of the database, of the columns that problems had at each migration."""

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
PROBLEM_COLUMNS = f"""{SECOND_PROBLEM_COLUMNS},
  problems.window_left, problems.window_right, problems.softcap, problems.alibi, problems.bias,
  problems.sinks"""


def standing_views(problem_columns: str) -> tuple[str, ...]:
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


def anytime_view(problem_columns: str) -> str:
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
