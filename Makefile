# `make tune` and `make test` do everything on a fresh machine, with a GPU and without one.

PYTHON ?= python3
JOBS ?= 2
RUN := .venv/bin/python
WORKLOAD ?= examples/quickstart.yaml
EFFORT ?= quick

.PHONY: tune test test-slow test-gpu mutate soak soak-decode lint golden docs clean environment environment-dev

# Tune a small workload, export the module, and check it against torch's SDPA.
tune: environment
	mkdir -p out
	.venv/bin/autoflash tune $(WORKLOAD) --db out/tune.db --effort $(EFFORT)
	.venv/bin/autoflash export --db out/tune.db --allow-predicted -o out/attention_dispatch.py > out/export.txt
	$(RUN) examples/check_against_sdpa.py out/attention_dispatch.py $(WORKLOAD)

# The CPU suite. A process either compiles kernels or interprets them, so it takes two.
test: environment-dev
	$(RUN) -m pytest -n $(JOBS) -m "not gpu and not slow" --ignore tests/interpret
	TRITON_INTERPRET=1 $(RUN) -m pytest -n $(JOBS) -m "not slow" tests/interpret

# What `make test` leaves out: features beside the main job, other targets and sizes.
test-slow: environment-dev
	$(RUN) -m pytest -n $(JOBS) -m "slow and not gpu" --ignore tests/interpret
	TRITON_INTERPRET=1 $(RUN) -m pytest -n $(JOBS) -m slow tests/interpret

test-gpu: environment-dev
	$(RUN) -m pytest -m gpu tests

# Break autoflash by each patch of tests/mutations: the test it names must fail. Minutes.
mutate: environment-dev
	$(RUN) tools/mutate.py --jobs $(JOBS)

# Two hundred candidates, thirty planted faults, processes killed at random: under ten minutes.
soak: environment-dev
	$(RUN) tests/soak/soak.py

# Random shapes, pages and lengths through random configs of decode: eight minutes on a GPU.
soak-decode: environment-dev
	$(RUN) tests/soak/soak_decode.py --seconds 480

lint: environment-dev
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/pyright --pythonpath $(RUN)

# Rewrite the rendered kernels that tests/golden holds; the diff is reviewed as code.
golden: environment-dev
	AUTOFLASH_REWRITE_GOLDENS=1 $(RUN) -m pytest tests/compile/test_goldens.py -k reviewed

# Write docs/cli.md from the commands, and tables of figures from the results.
docs: environment-dev
	$(RUN) tools/cli_reference.py
	$(RUN) tools/measured_tables.py

clean:
	rm -rf .venv out build dist .pytest_cache .ruff_cache .hypothesis

environment:
	@$(PYTHON) tools/environment.py

environment-dev:
	@$(PYTHON) tools/environment.py dev
