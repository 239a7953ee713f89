# Everything a person or CI types. `make demo` and `make test` do all the set-up on a fresh machine.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Setuptools warns of folders named like the package, of which there are none here.
PIP    := PYTHONWARNINGS='ignore:Editable installation' $(BIN)/python -m pip install --quiet --disable-pip-version-check

# The tests start hundreds of processes: each would compile our sources again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-slow test-optimised lint format bench model clean help

help:
	@echo "make demo      install, fetch a small real model, start the daemon, watch three clients stream"
	@echo "make test      install, fetch the model, run the whole test suite"
	@echo "make lint      ruff and mypy"
	@echo "make bench     the benchmarks that run on this machine"
	@echo "make clean     remove the virtual environment and caches of this folder"

$(STAMP): pyproject.toml
	@echo "Installing into $(VENV): a minute or two, 1.2 GB"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) --upgrade pip
	@$(PIP) --editable '.[daemon,gateway,cuda-check,dev]'
	@touch $@

model: $(STAMP)
	$(BIN)/kvpool pull smollm2-135m

demo: model
	$(BIN)/python -m kvpool.daemon.demo

test: model
	$(BIN)/python -m pytest -q -n 2 -m 'not slow' $(PYTEST_ARGS)

test-slow: model
	$(BIN)/python -m pytest -q -m slow $(PYTEST_ARGS)

test-optimised: model  # asserts of the tests count all the same: pytest rewrites them; nothing else may depend on one
	PYTHONOPTIMIZE=1 $(BIN)/python -O -m pytest -q -n 2 -m 'not slow' -W 'ignore:assertions not in test modules' $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@mkdir -p $(VENV)/typed && ln -sfn "$(CURDIR)" $(VENV)/typed/kvpool  # mypy finds packages by folder name
	MYPYPATH=$(VENV)/typed $(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: model
	$(BIN)/python -m bench.kernels
	$(BIN)/python -m bench.sampling
	$(BIN)/python -m bench.paging

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
