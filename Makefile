# make demo    a tiny model learns that thinking pays, on two CPU cores
# make test    every test, the slow ones too
# make check   ruff
# make setup   only .venv with the pinned requirements
PYTHON ?= python3
SEED ?= 0
BIN := .venv/bin
READY := .venv/.ready

.PHONY: setup demo test check

setup: $(READY)

$(READY): requirements.txt requirements-dev.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(v < (3, 10) and f"Python {v[0]}.{v[1]} is too old: make PYTHON=python3.11 (3.10 or newer)")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -r requirements-dev.txt
	touch $(READY)

demo: $(READY)
	$(BIN)/python -m demo --seed $(SEED)

test: $(READY)
	$(BIN)/python -m pytest -m "" --durations=5

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
