# Two commands do all the set-up on a fresh machine:
#   make serve   its own virtual environment, installs, starts the server on the bundled model
#   make test    its own virtual environment, installs, runs the tests
# `make check` is what CI runs.

PYTHON ?= python3
VENV ?= .venv
HOST ?= 127.0.0.1
PORT ?= 8000
# A Hugging Face name or a local folder; empty serves the bundled model.
MODEL ?=
# More flags for `packhorse embeddings`, or for pytest in `make test` and `make check`.
ARGS ?=
# How long `make storm` blows.
MINUTES ?= 10

# An interpreter with everything that is needed, torch for CUDA above all, for `make gpu-check`: then nothing is installed.
GPU_PYTHON ?=

# Where `make clients` puts the clients of others.
CLIENTS := .clients

BIN := $(VENV)/bin
INPUTS := pyproject.toml constraints.txt
# Two processes, one file at a time each: much of the suite waits for real processes.
PYTEST = $(BIN)/python -m pytest -n 2 --dist loadfile

# Installs the project with the extras named in the stamp file's name. pip says nothing unless it fails. Only `make serve`
# uses plain [demo]: the stamp of a larger set counts for the smaller ones.
define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "packhorse needs Python 3.11 or newer; name one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || { $(PYTHON) -m venv $(VENV) || \
	  { echo "cannot make a virtual environment with $(PYTHON) (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }; }
	@echo "installing packhorse[$(1)] into $(VENV) (minutes the first time)" >&2
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(1)]'
	@touch $@
endef

.PHONY: help serve test check install clients faults soak storm gpu-check format lint types clean

help:
	@echo 'make serve    start the server on the bundled model (HOST, PORT, MODEL, ARGS)'
	@echo 'make test     run the tests (ARGS for pytest)'
	@echo 'make check    what CI runs: format, lint, types, import rules, tests'
	@echo 'make clients  install the clients and load tools of others that tests/clients runs; without them those tests are skipped'
	@echo 'make faults   the tests of faults alone, with the aims of speed: for a machine that does nothing else'
	@echo 'make soak     the tests that count in thousands or wait for minutes, at their full length (half an hour)'
	@echo 'make storm    all faults at random on a running server (MINUTES, ARGS)'
	@echo 'make gpu-check  on a machine with GPUs: their tests, then their benchmark (GPU_PYTHON or VENV, ARGS for the benchmark)'
	@echo 'make format   format the code'
	@echo 'make clean    remove the virtual environment and caches'

$(VENV)/.installed-demo: $(INPUTS)
	$(call install,demo)

$(VENV)/.installed-test: $(INPUTS)
	$(call install,test)
	@touch $(VENV)/.installed-demo

$(VENV)/.installed-dev: $(INPUTS)
	$(call install,dev)
	@touch $(VENV)/.installed-demo $(VENV)/.installed-test

# exec: Ctrl-C and SIGTERM reach the server itself.
serve: $(VENV)/.installed-demo
	@exec $(BIN)/packhorse embeddings $(MODEL) --host $(HOST) --port $(PORT) $(ARGS)

test: $(VENV)/.installed-test
	$(PYTEST) $(ARGS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(PYTEST) $(ARGS)

# What `make check` installs by itself.
install: $(VENV)/.installed-dev

clients: $(CLIENTS)/.installed

# Each has pins of its own, so none of them goes into $(VENV). uv installs in seconds what takes pip minutes. The stamp of an
# installation that was cut off is missing, and everything is made anew.
$(CLIENTS)/.installed: tests/clients/python.txt tests/clients/aiperf.txt tests/clients/package.json
	@command -v npm >/dev/null || { echo "make clients needs node and npm (on Debian and Ubuntu: apt install nodejs npm)" >&2; exit 1; }
	@echo "installing the clients of others into $(CLIENTS)" >&2
	@rm -rf $(CLIENTS)
	@$(PYTHON) -m venv $(CLIENTS)/uv
	@$(CLIENTS)/uv/bin/python -m pip install --quiet --disable-pip-version-check uv
	@for each in python aiperf; do \
	  $(CLIENTS)/uv/bin/uv venv --quiet --python $(CLIENTS)/uv/bin/python $(CLIENTS)/$$each && \
	  $(CLIENTS)/uv/bin/uv pip install --quiet --python $(CLIENTS)/$$each/bin/python -r tests/clients/$$each.txt || exit 1; \
	done
	@mkdir -p $(CLIENTS)/node && cp tests/clients/package.json $(CLIENTS)/node/
	@npm install --prefix $(CLIENTS)/node --silent --no-audit --no-fund --no-package-lock
	@touch $@

faults: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n 0 tests/process/faults --aims $(ARGS)

soak: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n 0 tests/reports --soak $(ARGS)

storm: $(VENV)/.installed-test
	PYTHONPATH=tests $(BIN)/python tests/process/faults/storm.py --minutes $(MINUTES) $(ARGS)

# Says that there is no GPU before minutes of installing, not after.
ifeq ($(GPU_PYTHON),)
gpu-check:
	@test -e /dev/nvidiactl || test -e /dev/dxg || command -v nvidia-smi >/dev/null || \
	  { echo "gpu-check: this machine has no GPU that NVIDIA's driver tells of; nothing was run" >&2; exit 1; }
	@$(MAKE) --no-print-directory $(VENV)/.installed-test
	@$(BIN)/python benchmarks/gpu_check.py $(ARGS)
else
gpu-check:
	@$(GPU_PYTHON) benchmarks/gpu_check.py $(ARGS)
endif

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/lint-imports

types: $(VENV)/.installed-dev
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(CLIENTS) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
