# Everything runs in .venv, which each target sets up first. See README.md.
PYTHON ?= python3
VENV_BIN := .venv/bin
PYTEST := $(VENV_BIN)/python -m pytest

# Real engines and clusters have the machine to themselves; of the other tests several files run at a time.
APART := tests/cluster tests/engines
TOGETHER := --numprocesses=auto --maxprocesses=4 --dist=loadfile $(APART:%=--ignore=%)

.DEFAULT_GOAL := help
.PHONY: help setup dev demo test test-all tables bench-timing bench-routing bench-router bench-local bench-operator soak check format clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16
	@echo "Settings: PYTHON=python3.12 (the Python of .venv), ARGS='--port 8001' (of demo),"
	@echo "VLLM_PYTHON=PATH (a vLLM that is installed already), PIP_EXTRA_INDEX_URL=URL (for torch's CPU build)"

setup: ## Set up .venv: the engines for CPU, and Tandem
	@$(PYTHON) scripts/setup.py

dev:
	@$(PYTHON) scripts/setup.py --dev

demo: setup ## Prove disaggregation on this machine with real engines
	@$(VENV_BIN)/tandem demo $(ARGS)

test: dev ## Run the tests (unit tests and one shared pair of real engines)
	$(PYTEST) -m "not slow" $(TOGETHER)
	$(PYTEST) -m "not slow" $(APART)

test-all: dev ## Run every test, as CI does
	$(PYTEST) $(TOGETHER)
	$(PYTEST) $(APART)

tables: dev ## Write the tables of docs/ that show what tests see
	$(PYTEST) -m table --write-docs

bench-timing: dev ## Compare the simulator's times with a real pair's; writes docs/simulator.md
	$(VENV_BIN)/python benchmarks/timing/run.py

bench-routing: dev ## Compare routing strategies, and with peers (an hour); writes docs/routing.md
	$(VENV_BIN)/python benchmarks/routing/run.py $(ARGS)

bench-router: dev ## Measure what the router costs beside its peers (ninety minutes); writes docs/performance.md
	$(VENV_BIN)/python benchmarks/router/run.py $(ARGS)

bench-local: dev ## Compare the pair with two colocated engines (forty minutes); writes docs/performance.md
	$(VENV_BIN)/python benchmarks/local/run.py $(ARGS)

bench-operator: dev ## Measure the operator with 1 and 200 endpoints (ten minutes); writes docs/operator-faults.md
	$(VENV_BIN)/python benchmarks/operator/run.py $(ARGS)

soak: dev ## Send 2,000 requests while processes are killed and frozen (most of an hour)
	$(VENV_BIN)/python benchmarks/soak/run.py $(ARGS)

check: dev ## Lint, types, layers
	$(VENV_BIN)/ruff check .
	$(VENV_BIN)/ruff format --check .
	$(VENV_BIN)/mypy
	$(VENV_BIN)/lint-imports

format: dev ## Format the code
	$(VENV_BIN)/ruff check --fix .
	$(VENV_BIN)/ruff format .

clean: ## Remove .venv and caches
	rm -rf .venv .venv-peers .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
