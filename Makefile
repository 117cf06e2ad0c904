# make serve and make test are the only set-up commands a newcomer needs; each installs what it lacks.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL ?= kimi-nano
PORT ?= 8000
XDIST := --numprocesses auto --maxprocesses 8 --dist worksteal
# Tests that never import torch: scheduler, KV cache, text, grammar, n-gram lookups.
FAST := tests/cpu/kv/test_blocks.py tests/cpu/kv/test_prefix.py tests/cpu/kv/test_retention.py \
  tests/cpu/kv/test_tiers.py tests/cpu/kv/test_worth.py tests/cpu/text tests/cpu/grammar \
  tests/cpu/engine/test_scheduler.py tests/cpu/engine/test_scheduler_traces.py tests/cpu/speculation/test_suffix.py
# What the tree must look like; the other tests of that folder run the bundled model and its trainer.
HOUSE := tests/cpu/house/test_imports.py tests/cpu/house/test_rules.py tests/cpu/house/test_docs.py \
  tests/cpu/house/test_packaging.py

.PHONY: install serve test fast soak emulate check bench format clean

install: $(VENV)/.installed
serve: install
	$(BIN)/perilune serve $(MODEL) --port $(PORT)

# Bytecode is kept even if the environment forbids it: some 130 processes import the package, 0.4 s each without.
test: export PYTHONDONTWRITEBYTECODE =
test: $(VENV)/.test
	$(BIN)/python -m pytest $(XDIST)

fast: $(VENV)/.test
	$(BIN)/python -m pytest $(XDIST) -p tests.no_torch -m "not slow" $(FAST)

# Hours, by hand: kills, attacks, memory growth, fuzzing. make soak SHARE=0.1 runs a tenth.
SHARE ?= 1
soak: $(VENV)/.test
	$(BIN)/python -m pytest tests/soak -s --timeout 0 --share $(SHARE)

# Every CUDA kernel on the CPU, in an emulator of the GPU: tens of minutes.
emulate: $(VENV)/.test
	$(BIN)/python -m pytest tests/emulate $(XDIST) --timeout 0

check: $(VENV)/.check
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest $(HOUSE)
	$(BIN)/python -m runs.readme --check

bench: install
	$(BIN)/perilune bench decode $(MODEL)

format: $(VENV)/.check
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/python -m tests.cpu.house.test_rules

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("perilune needs Python 3.11 or newer: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -e .
	touch $@

$(VENV)/.test: $(VENV)/.installed
	$(BIN)/python -m pip install -q -e '.[test]'
	touch $@

$(VENV)/.check: $(VENV)/.test
	$(BIN)/python -m pip install -q -e '.[check]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
