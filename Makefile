# Every target sets up what it needs in .venv: a Python of 3.11 or later with its headers, a C
# compiler and make are all that must be there before.

PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && \
	{ echo $$python; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
BUILD := pyproject.toml setup.py MANIFEST.in $(wildcard csrc/*.py csrc/*/*.c csrc/*/*.h)
DEMO_STORE := demo-store
# Stores of the tests: most of the time goes by in waiting for the disk, so in memory, given 8 GiB.
SCRATCH := $(shell df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 && $$4 > 8388608 {print $$6}')
SCRATCH := $(or $(SCRATCH),$(TMPDIR),/tmp)
# compat: on sys.path as a folder, where Spark finds the format by itself.
INSTALL := $(BIN)/python -m pip install --quiet --config-settings editable_mode=compat --editable .
# More than cores, for many tests wait for other processes; each takes up to 600 MB.
WORKERS ?= $(shell expr `getconf _NPROCESSORS_ONLN` + 2)

# The demo and the tests start hundreds of processes: none compiles what another has compiled.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow lint ctest compiled bench docs clean

help: ## show this
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' Makefile

demo: $(VENV)/.spark ## run the Spark demo; INPUT=path for a directory, CSV or Parquet of yours
	@rm -rf $(DEMO_STORE)
	@$(BIN)/txnkv demo --store $(DEMO_STORE) $(if $(INPUT),--input "$(INPUT)")

test: ## lint, the C core under sanitizers, and all tests but the slow ones
	@$(MAKE) --no-print-directory -j 3 ctest lint compiled
	@scratch=$$(mktemp -d $(SCRATCH)/txnkv-test.XXXXXX) && trap 'rm -rf "$$scratch"' EXIT && \
		TMPDIR=$$scratch $(BIN)/pytest -n $(WORKERS) --dist loadscope -m "not slow" -rs

test-slow: $(VENV)/.dev ## the tests that take minutes
	$(BIN)/pytest -m slow -rs

lint: $(VENV)/.dev ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

ctest: ## the C core's own tests, under AddressSanitizer and UBSan
	$(MAKE) -C csrc/tests test

compiled: $(VENV)/.dev # once: every worker would compile all modules of the tests for itself
	@$(BIN)/pytest --collect-only -qq >/dev/null

bench: $(VENV)/.bench ## the benchmarks, beside their peers; BENCH="--quick get" chooses
	$(BIN)/python -m benchmarks $(BENCH)

docs: $(VENV)/.docs ## the site of the documentation, in site/; a warning is an error
	$(BIN)/mkdocs build --quiet --strict

clean: ## remove all that was built or set up here
	rm -rf $(VENV) build dist site *.egg-info $(DEMO_STORE) txnkv/_core*.so txnkv/_native*.so
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis csrc/tests/bin
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.made:
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or later found: install one, or name it as" \
		"make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.package: $(VENV)/.made $(BUILD)
	$(INSTALL)
	@touch $@

# What else is asked for: with the package in place the C core is not built again.
$(VENV)/.spark: $(VENV)/.package
	$(BIN)/python -m pip install --quiet 'txnkv[spark]'
	@touch $@

$(VENV)/.dev: $(VENV)/.package
	$(BIN)/python -m pip install --quiet 'txnkv[bench,dev,spark]'
	@touch $@

$(VENV)/.bench: $(VENV)/.package
	$(BIN)/python -m pip install --quiet 'txnkv[bench,peers,spark]'
	@touch $@

$(VENV)/.docs: $(VENV)/.package
	$(BIN)/python -m pip install --quiet 'txnkv[docs]'
	@touch $@
