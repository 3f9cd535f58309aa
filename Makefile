# make demo    a tiny model learns that thinking pays, on two CPU cores
# make test    every promise: all tests but the rare ones, and a part of long series; two at a time
# make test-all   every test, and every case (CONTRIBUTING.md, Tests: what each runs, and how long it may take)
# make check   ruff
# make setup   only .venv with the pinned requirements, those of the tests too
PYTHON ?= python3
SEED ?= 0
BIN := .venv/bin
READY := .venv/.ready
READY_TO_TEST := .venv/.ready-to-test

.PHONY: setup demo test test-all check

setup: $(READY_TO_TEST)

$(READY): requirements.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(v < (3, 10) and f"Python {v[0]}.{v[1]} is too old: make PYTHON=python3.11 (3.10 or newer)")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -r requirements.txt
	touch $(READY)

$(READY_TO_TEST): $(READY) requirements-dev.txt
	$(BIN)/python -m pip install -r requirements-dev.txt
	touch $(READY_TO_TEST)

demo: $(READY)
	$(BIN)/python -m demo --seed $(SEED)

test: $(READY_TO_TEST)
	$(BIN)/python -m pytest -n 2 --thin
	$(BIN)/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder -m "slow and not rare and not timed" --thin --durations=10
	$(BIN)/python -m pytest -m "timed and not rare" --thin

test-all: $(READY_TO_TEST)
	$(BIN)/python -m pytest -m "" --durations=20

check: $(READY_TO_TEST)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
