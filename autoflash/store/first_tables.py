"""The tables as the first migration makes them; what has been released is never edited."""

# Columns that make a key are NOT NULL with a sentinel ("" or 0): SQLite's UNIQUE lets NULLs repeat.
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
