# `make help` lists what there is to run. Everything happens in $(VENV), which is made on first use.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CXX_FILES = find csrc tests examples -type f \( -name '*.c' -o -name '*.cpp' -o -name '*.cu' -o -name '*.h' \)

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The packages are installed without bytecode, which takes half the time; Python then compiles what is imported, once.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo test fidelity lint format readme bench bench-cache quality quality-dapd quality-cover mrf9 gpu-check clean

help: ## list the targets
	@sed -nE 's/^([a-z0-9-]+):.*## (.*)/make \1\t\2/p' Makefile | expand -t 20

$(VENV)/requirements: requirements.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("Python 3.10 or newer is needed: make PYTHON=python3.12, say")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile -r requirements.txt
	@touch $@

# Editable, so that only a change of the compiled part or of the packaging has to be installed again.
$(VENV)/installed: $(VENV)/requirements pyproject.toml setup.py $(shell find csrc -type f)
	DLMKERN_CUDA=$${DLMKERN_CUDA-$$($(BIN)/python -c 'import torch; print("auto" if torch.cuda.is_available() else "0")')} \
	  $(BIN)/python -m pip install --quiet --no-build-isolation --no-deps --editable .
	@touch $@

install: $(VENV)/installed ## make the environment and build the project in it
demo: install ## DepCap beside two baselines on the embedded model, and one answer step by step
	@$(BIN)/python examples/demo.py

test: install ## every test; TEST="-k kl" passes options to pytest
	@$(BIN)/python -m tests.run $(TEST)

fidelity: install ## every recorded decoding of the official code, with counts (minutes)
	$(BIN)/python -m pytest tests/decoders/test_recorded.py --all-recorded -n 2 -rP

lint: $(VENV)/requirements ## style and types, as CI checks them
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(CXX_FILES) | xargs $(BIN)/clang-format --dry-run -Werror
	$(BIN)/mypy

format: $(VENV)/requirements ## rewrite the files in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(CXX_FILES) | xargs $(BIN)/clang-format -i

readme: install ## rewrite the generated parts of README.md
	$(BIN)/python docs/op_table.py

bench: install ## time every op: BENCH="--quick --json FILE token_stats"
	$(BIN)/python -m benchmarks $(BENCH)

bench-cache: install ## tokens a second with each KV cache, and what a pass is made of: BENCH="--quick --json FILE", or --quality
	$(BIN)/python -m benchmarks.cache $(BENCH)

quality: install ## valid answers against forwards, DepCap beside other decoders
	$(BIN)/python -m benchmarks.quality

quality-dapd: install ## the same for DAPD, and how forwards grow with the number of independent parts
	$(BIN)/python -m benchmarks.dapd

quality-cover: install ## what taking tokens back gains and costs: COVER, WINO and Saber
	$(BIN)/python -m benchmarks.cover

mrf9: install ## whether attention shows the true dependencies
	$(BIN)/python -m benchmarks.mrf9

gpu-check: ## on a GPU machine, with the CUDA torch that $(PYTHON) has: build, test and time everything
	$(PYTHON) -m benchmarks.gpu_check $(GPU_CHECK)

clean: ## remove what was built, but not the environment
	rm -rf build dist dlmkern/*.so *.egg-info $(VENV)/installed
