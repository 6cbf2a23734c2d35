# make demo      install, fetch a small model, serve it, ask it eight questions at once
# make test      install what the tests need and run them all
# make lint      ruff and pyright
# make soak      a million calls of the block pool, and scheduler properties over a million steps (SOAK="--seed 1 ..." for its flags)
# make docs      build the documentation site into build/site, and fail at broken links
# make goldens   make the golden outputs again with transformers on torch; `make goldens-check` compares only
# make bench-cpu compare with the bare JAX loop and other engines on this machine (BENCH="--rounds 1 ..." for flags)
# make bench-vision  images: preprocessing and vision tower beside transformers, gaps in a stream of text
# make bench-memory  shared prefix, more sequences than the KV cache holds, used slots (BENCH="--model tiny ..." for flags)
# make newest    a smoke part of the tests with another Python (NEWEST=python3.12) and the newest JAX it gets
# make gpu-proof compile the GPU kernels and steps for A100, H100 and H200 with no GPU, and check what came (PROOF="--only
#                triton ..." for flags); gpu-proof-full: the wide matrix; gpu-proof-oldest: a few with PYTHON and its JAX

PYTHON ?= python3
NEWEST ?= python3.12
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
PROVER := $(shell $(NEWEST) -c "" 2>/dev/null && echo $(NEWEST) || echo $(PYTHON))

.PHONY: demo test soak lint docs goldens goldens-check bench-cpu bench-vision bench-memory newest gpu-proof gpu-proof-full \
	gpu-proof-oldest clean

demo: $(VENV)/.installed
	$(BIN)/python -m serving.demo

test: $(VENV)/.installed-test
	$(BIN)/python -m checkpoints.demo_model
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

soak: $(VENV)/.installed-test
	$(BIN)/python -m tests.memory.soak
	$(BIN)/python -m tests.scheduling.soak $(SOAK)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open build/site/index.html"

goldens: .venv-goldens/.installed
	.venv-goldens/bin/python tests/goldens/make.py
	.venv-goldens/bin/python tests/goldens/make_vl.py

goldens-check: .venv-goldens/.installed
	.venv-goldens/bin/python tests/goldens/make.py --check
	.venv-goldens/bin/python tests/goldens/make_vl.py --check

bench-cpu: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks.cpu $(BENCH)

bench-vision: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks.vision $(BENCH)

bench-memory: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks.memory $(BENCH)

newest: .venv-newest/.installed
	.venv-newest/bin/python -c "import jax, sys; print('Python', sys.version.split()[0], 'with JAX', jax.__version__)"
	.venv-newest/bin/python -m pytest -n $(WORKERS) --dist loadfile tests/kernels_pallas tests/models tests/runtime tests/engine

gpu-proof: .venv-gpu-proof/.installed
	.venv-gpu-proof/bin/python -m benchmarks.gpu_proof --skip-unavailable $(PROOF)

gpu-proof-full: .venv-gpu-proof/.installed
	.venv-gpu-proof/bin/python -m benchmarks.gpu_proof --skip-unavailable --full $(PROOF)

gpu-proof-oldest: .venv-gpu-proof-oldest/.installed
	.venv-gpu-proof-oldest/bin/python -m benchmarks.gpu_proof --skip-unavailable \
		--only '^triton.*/h100/d(64|128)-p16-g7-bfloat16$$'

clean:
	rm -rf .venv .venv-goldens .venv-newest .venv-gpu-proof .venv-gpu-proof-oldest .cache .pytest_cache .ruff_cache .hypothesis build *.egg-info

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip

# Each of these holds what the one before it holds.
$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install -q -e ".[demo]"
	touch $@

$(VENV)/.installed-test: pyproject.toml | $(VENV)/.installed
	$(BIN)/python -m pip install -q -e ".[test]"
	touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/.installed-test
	$(BIN)/python -m pip install -q -e ".[test,dev]"
	touch $@

$(VENV)/.installed-docs: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install -q -e ".[docs]"
	touch $@

# The oracle's environment: torch is no dependency of anything else here. Older transformers cut the times of a video
# off before they multiply them.
.venv-goldens/.installed: Makefile
	$(PYTHON) -m venv .venv-goldens
	.venv-goldens/bin/python -m pip install -q --upgrade pip
	.venv-goldens/bin/python -m pip install -q torch==2.13.0 "transformers>=5.24" safetensors tokenizers numpy pillow
	touch $@

.venv-newest/.installed: pyproject.toml
	$(NEWEST) -m venv .venv-newest
	.venv-newest/bin/python -m pip install -q --upgrade pip
	.venv-newest/bin/python -m pip install -q -e ".[test]"
	touch $@

.venv-gpu-proof/.installed: pyproject.toml
	$(call prover,$(PROVER))

.venv-gpu-proof-oldest/.installed: pyproject.toml
	$(call prover,$(PYTHON))

# Without dependencies: cuDNN, cuBLAS and NCCL (2 GB) are there to run programs, and nothing is run. The plugin must have
# JAX's own version. Where the wheels cannot be had the proofs say so and are skipped, and the next make tries again.
define prover
$(1) -m venv $(@D)
$(@D)/bin/python -m pip install -q --upgrade pip
$(@D)/bin/python -m pip install -q -e .
version=$$($(@D)/bin/python -c "import jax; print(jax.__version__)"); \
$(@D)/bin/python -m pip install -q --no-deps nvidia-cuda-nvcc-cu12 \
	jax-cuda12-plugin==$$version jax-cuda12-pjrt==$$version && touch $@ || true
endef
