# make env    a virtual environment with everything, and OpenRLHF patched
# make demo   train a real model on this machine (two CPU cores are enough)
# make test   all tests that need no GPU
# make lint   ruff and pyright
# make lock   resolve requirements/*.in again (needs uv)

PYTHON ?= python3.11
VENV ?= .venv
BIN = $(VENV)/bin
STAMP = $(VENV)/.ready
TORCH = $(shell grep '^torch==' requirements/cpu.txt)
COMPILE = uv pip compile --python-version 3.11 --python-platform x86_64-manylinux_2_35 --no-header --no-annotate \
	--no-emit-index-url --no-emit-find-links --override requirements/overrides.txt

.PHONY: env demo test lint lock

env: $(STAMP)

$(STAMP): requirements/cpu.txt setup.py patches/openrlhf-0.11.2/hashes.json
	$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --no-deps $(TORCH) || { echo "make env: pip cannot install $(TORCH); \
	add PyTorch's CPU wheel index to pip (PIP_EXTRA_INDEX_URL) and run make env again." >&2; exit 1; }
	$(BIN)/pip install --quiet --no-deps -r requirements/cpu.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation -e .
	$(BIN)/gapo patch apply
	@touch $(STAMP)

demo: env
	$(BIN)/gapo demo $(ARGS)

test: env
	$(BIN)/python -m pytest $(ARGS)

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# The list for CPUs holds a build of torch that only PyTorch's CPU wheel index has: name it in UV_EXTRA_INDEX_URL.
lock:
	$(COMPILE) --override requirements/overrides-cpu.txt --index-strategy unsafe-best-match requirements/cpu.in -o requirements/cpu.txt
	$(COMPILE) requirements/gpu.in -o requirements/gpu.txt
	sed -i "1i # Resolved for Python 3.11 on Linux x86_64 from gpu.in. It was resolved, not run.\n# Install it with: pip install --no-deps -r requirements/gpu.txt" requirements/gpu.txt
