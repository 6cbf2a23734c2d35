# make demo        install, fetch a small model, serve it, ask it eight questions at once
# make test        install what the tests need and run all that are not marked `full` (see docs/testing.md)
# make test-full   the others: long or rare; and ten times the examples of every property
# make lint        ruff and pyright
# make soak        a million calls of the block pool, and scheduler properties over a million steps (SOAK="--seed 1 ...")
# make docs        build the documentation site into build/site, and fail at broken links
# make goldens     make the golden outputs again with transformers on torch
# make goldens-check  the same, and compare only; nothing to do if their inputs are those of the last check
# make bench-cpu   compare with the bare JAX loop and other engines on this machine (BENCH="--rounds 1 ..." for flags)
# make bench-vision  images: preprocessing and vision tower beside transformers, gaps in a stream of text
# make bench-memory  shared prefix, more sequences than the KV cache holds, used slots (BENCH="--model tiny ..." for flags)
# make newest      the tests marked `smoke` with another Python (NEWEST=python3.12) and the newest JAX it gets
# make gpu-proof   compile the GPU kernels and steps for A100, H100 and H200 with no GPU, and check what came (PROOF="--only
#                  triton ..." for flags; PROOF=--unless-recorded: only what proven.json does not have);
#                  gpu-proof-full: the wide matrix; gpu-proof-oldest: a few with PYTHON and its JAX; gpu-proof-tests: that
#                  proofs can fail
#
# Environments are made by uv, or by pip where there is no uv and pip cannot get it: see .ci/install.

PYTHON ?= python3
NEWEST ?= python3.12
WORKERS ?= 2
# The oracle of the goldens. Older transformers cut the times of a video off before they multiply them.
TORCH := 2.13.0
TRANSFORMERS := 5.24.0
VENV := .venv
BIN := $(VENV)/bin
PROVER := $(shell $(NEWEST) -c "" 2>/dev/null && echo $(NEWEST) || echo $(PYTHON))

# Tests start many processes: none should compile our modules, and pytest its assertions, again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-full soak lint docs goldens goldens-check bench-cpu bench-vision bench-memory newest gpu-proof \
	gpu-proof-full gpu-proof-oldest gpu-proof-tests clean

demo: $(VENV)/.installed
	$(BIN)/python -m serving.demo

test: $(VENV)/.installed-test
	$(BIN)/python -m checkpoints.demo_model
	$(BIN)/python -m pytest -n $(WORKERS) -m "not full and not gpu_proof"

test-full: $(VENV)/.installed-test
	$(BIN)/python -m checkpoints.demo_model
	$(BIN)/python -m pytest -n $(WORKERS) -m full
	$(BIN)/python -m pytest -n $(WORKERS) -m "hypothesis and not full" --wide --timeout=3000

soak: $(VENV)/.installed-test
	$(BIN)/python -m tests.memory.soak
	$(BIN)/python -m tests.scheduling.soak $(SOAK)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

goldens: .venv-goldens/.installed
	.venv-goldens/bin/python tests/goldens/make.py
	.venv-goldens/bin/python tests/goldens/make_vl.py
	.venv-goldens/bin/python -m tests.goldens.inputs --record

goldens-check: $(VENV)/.installed-test
	$(BIN)/python -m tests.goldens.inputs || $(MAKE) goldens-compare

.PHONY: goldens-compare
goldens-compare: .venv-goldens/.installed
	.venv-goldens/bin/python tests/goldens/make.py --check
	.venv-goldens/bin/python tests/goldens/make_vl.py --check
	.venv-goldens/bin/python -m tests.goldens.inputs --record

bench-cpu: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks.cpu $(BENCH)

bench-vision: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks.vision $(BENCH)

bench-memory: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks.memory $(BENCH)

newest: .venv-newest/.installed
	.venv-newest/bin/python -c "import jax, sys; print('Python', sys.version.split()[0], 'with JAX', jax.__version__)"
	.venv-newest/bin/python -m pytest -n $(WORKERS) -m "smoke and not full and not gpu_proof"

gpu-proof: .venv-gpu-proof/.installed
	.venv-gpu-proof/bin/python -m benchmarks.gpu_proof --skip-unavailable --record $(PROOF)

gpu-proof-full: .venv-gpu-proof/.installed
	.venv-gpu-proof/bin/python -m benchmarks.gpu_proof --skip-unavailable --full $(PROOF)

gpu-proof-oldest: .venv-gpu-proof-oldest/.installed
	.venv-gpu-proof-oldest/bin/python -m benchmarks.gpu_proof --skip-unavailable --record $(PROOF) \
		--only '^triton.*/h100/d(64|128)-p16-g7-bfloat16$$'

# Programs for GPUs that are not there cannot be read back from the compilation cache.
gpu-proof-tests: .venv-gpu-proof/.installed
	JAX_ENABLE_COMPILATION_CACHE=false .venv-gpu-proof/bin/python -m pytest -n $(WORKERS) -m gpu_proof

clean:
	rm -rf .venv .venv-goldens .venv-newest .venv-gpu-proof .venv-gpu-proof-oldest .cache .pytest_cache .ruff_cache .hypothesis build *.egg-info

# Each of these holds what the one before it holds.
$(VENV)/.installed: pyproject.toml
	.ci/install $(VENV) $(PYTHON) -e ".[demo]"
	touch $@

$(VENV)/.installed-test: pyproject.toml | $(VENV)/.installed
	.ci/install $(VENV) $(PYTHON) -e ".[test]"
	touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/.installed-test
	.ci/install $(VENV) $(PYTHON) -e ".[test,dev]"
	touch $@

$(VENV)/.installed-docs: pyproject.toml
	.ci/install $(VENV) $(PYTHON) -e ".[docs]"
	touch $@

# torch is no dependency of anything else here. pip installs it: only pip finds the wheel for CPUs that its settings name.
.venv-goldens/.installed: Makefile
	$(PYTHON) -m venv .venv-goldens
	.venv-goldens/bin/python -m pip install -q --upgrade pip
	.venv-goldens/bin/python -m pip install -q torch==$(TORCH) transformers==$(TRANSFORMERS) safetensors tokenizers numpy pillow
	touch $@

.venv-newest/.installed: pyproject.toml
	.ci/install .venv-newest $(NEWEST) -e ".[test]"
	touch $@

.venv-gpu-proof/.installed: pyproject.toml
	$(call prover,$(PROVER))

.venv-gpu-proof-oldest/.installed: pyproject.toml
	$(call prover,$(PYTHON))

# Without dependencies: cuDNN, cuBLAS and NCCL (2 GB) are there to run programs, and nothing is run. The plugin must have
# JAX's own version. Where the wheels cannot be had the proofs say so and are skipped, and the next make tries again.
define prover
.ci/install $(@D) $(1) -e ".[test]"
version=$$($(@D)/bin/python -c "import jax; print(jax.__version__)"); \
.ci/install $(@D) $(1) --no-deps nvidia-cuda-nvcc-cu12 \
	jax-cuda12-plugin==$$version jax-cuda12-pjrt==$$version && touch $@ || true
endef
