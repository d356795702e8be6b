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
) STRICT;

CREATE TABLE toolchains (
  id INTEGER PRIMARY KEY,
  driver TEXT NOT NULL,
  cuda TEXT NOT NULL,
  torch TEXT NOT NULL,
  triton TEXT NOT NULL,
  ptxas TEXT NOT NULL,
  fp_fusion INTEGER NOT NULL CHECK (fp_fusion IN (0, 1)),
  UNIQUE (driver, cuda, torch, triton, ptxas, fp_fusion)
) STRICT;

CREATE TABLE kernels (
  id INTEGER PRIMARY KEY,
  family TEXT NOT NULL,
  variant TEXT NOT NULL DEFAULT '',
  digest TEXT NOT NULL,
  text TEXT NOT NULL DEFAULT '',
  UNIQUE (family, digest)
) STRICT;

CREATE TABLE configs (
  id INTEGER PRIMARY KEY,
  family TEXT NOT NULL,
  knobs_json TEXT NOT NULL CHECK (json_valid(knobs_json)),
  UNIQUE (family, knobs_json)
) STRICT;

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
, uid TEXT NOT NULL DEFAULT '', locked_clock_mhz INTEGER NOT NULL DEFAULT 0) STRICT;

CREATE TABLE run_problems (
  run_id INTEGER NOT NULL REFERENCES runs (id),
  problem_id INTEGER NOT NULL REFERENCES problems (id),
  weight REAL NOT NULL,
  PRIMARY KEY (run_id, problem_id)
) STRICT;

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
  recorded_at TEXT NOT NULL, asked_at TEXT NOT NULL DEFAULT '', compiled_at TEXT NOT NULL DEFAULT '',
  CHECK (regime <> 'none' OR median_us IS NULL)
) STRICT;

CREATE INDEX trials_by_problem ON trials (problem_id, run_id, config_id);

CREATE INDEX trials_by_run ON trials (run_id);

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
) STRICT;

CREATE INDEX decisions_by_problem ON decisions (problem_id, run_id);

CREATE INDEX decisions_by_run ON decisions (run_id);

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
WINDOW of_run AS (PARTITION BY timed.run_id ORDER BY timed.id);

CREATE TABLE exports (
  id INTEGER PRIMARY KEY,
  uid TEXT NOT NULL UNIQUE,
  module_sha256 TEXT NOT NULL,
  most_configs INTEGER NOT NULL,
  exported_at TEXT NOT NULL
) STRICT;

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
) STRICT;

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
) STRICT;

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
  pages TEXT NOT NULL,
  kv_scales TEXT NOT NULL,
  window_left INTEGER NOT NULL,
  window_right INTEGER NOT NULL,
  softcap INTEGER NOT NULL CHECK (softcap IN (0, 1)),
  alibi INTEGER NOT NULL CHECK (alibi IN (0, 1)),
  bias INTEGER NOT NULL CHECK (bias IN (0, 1)),
  sinks INTEGER NOT NULL CHECK (sinks IN (0, 1)),
  mask TEXT NOT NULL,
  masked_by TEXT NOT NULL,
  density INTEGER NOT NULL,
  mask_block_q INTEGER NOT NULL,
  mask_block_k INTEGER NOT NULL,
  dropout INTEGER NOT NULL CHECK (dropout IN (0, 1)),
  UNIQUE (
    op, dtype, head_dim, num_heads, num_kv_heads, batch, seqlen_q, seqlen_k, causal, page_size,
    layout, kv_layout, lengths, kv_dtype, out_dtype, acc_dtype, head_dim_v, deterministic,
    batch_invariant, pages, kv_scales, window_left,
    window_right, softcap, alibi, bias, sinks, mask, masked_by,
    density, mask_block_q, mask_block_k, dropout
  )
) STRICT;

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
  ranked.id AS decision_id, ranked.run_id, runs.gpu_id,
  gpus.name AS gpu, gpus.arch, gpus.num_sms, gpus.memory_gib, gpus.mig_profile,
  toolchains.driver, toolchains.cuda, toolchains.torch, toolchains.triton, toolchains.ptxas,
  toolchains.fp_fusion,
  problems.op, problems.dtype, problems.batch, problems.num_heads, problems.num_kv_heads,
  problems.head_dim, problems.seqlen_q, problems.seqlen_k, problems.causal, problems.page_size,
  problems.layout, problems.kv_layout, problems.lengths, problems.kv_dtype, problems.out_dtype,
  problems.acc_dtype, problems.head_dim_v, problems.deterministic, problems.batch_invariant,
  problems.pages, problems.kv_scales,
  problems.window_left, problems.window_right, problems.softcap, problems.alibi, problems.bias,
  problems.sinks,
  problems.mask, problems.masked_by, problems.density, problems.mask_block_q,
  problems.mask_block_k, problems.dropout,
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
WHERE ranked.age = 1;

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
  gpus.name AS gpu, gpus.arch, gpus.num_sms, gpus.memory_gib, gpus.mig_profile,
  toolchains.driver, toolchains.cuda, toolchains.torch, toolchains.triton, toolchains.ptxas,
  toolchains.fp_fusion,
  problems.op, problems.dtype, problems.batch, problems.num_heads, problems.num_kv_heads,
  problems.head_dim, problems.seqlen_q, problems.seqlen_k, problems.causal, problems.page_size,
  problems.layout, problems.kv_layout, problems.lengths, problems.kv_dtype, problems.out_dtype,
  problems.acc_dtype, problems.head_dim_v, problems.deterministic, problems.batch_invariant,
  problems.pages, problems.kv_scales,
  problems.window_left, problems.window_right, problems.softcap, problems.alibi, problems.bias,
  problems.sinks,
  problems.mask, problems.masked_by, problems.density, problems.mask_block_q,
  problems.mask_block_k, problems.dropout
FROM best
JOIN gpus ON gpus.id = best.gpu_id
JOIN toolchains ON toolchains.id = best.toolchain_id
JOIN problems ON problems.id = best.problem_id
JOIN configs ON configs.id = best.config_id
JOIN kernels ON kernels.id = best.kernel_id;

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
  configs.family, configs.knobs_json,
  problems.op, problems.dtype, problems.batch, problems.num_heads, problems.num_kv_heads,
  problems.head_dim, problems.seqlen_q, problems.seqlen_k, problems.causal, problems.page_size,
  problems.layout, problems.kv_layout, problems.lengths, problems.kv_dtype, problems.out_dtype,
  problems.acc_dtype, problems.head_dim_v, problems.deterministic, problems.batch_invariant,
  problems.pages, problems.kv_scales,
  problems.window_left, problems.window_right, problems.softcap, problems.alibi, problems.bias,
  problems.sinks,
  problems.mask, problems.masked_by, problems.density, problems.mask_block_q,
  problems.mask_block_k, problems.dropout
FROM timed
JOIN problems ON problems.id = timed.problem_id
JOIN configs ON configs.id = timed.config_id
WHERE timed.before_us IS NULL OR timed.median_us < timed.before_us;
