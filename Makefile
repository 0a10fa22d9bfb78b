# Two commands do everything on a fresh clone: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PURE := tests/schedule tests/adaptation tests/cost tests/config tests/outer/policy src/spantrain/core src/spantrain/cost \
	src/spantrain/schedule src/spantrain/formats src/spantrain/adaptation

BACKEND ?= cuda:0
ON_ANY_BACKEND := $(addprefix tests/runtime/test_,processes.py losses.py tensor_processes.py switch_processes.py \
	resume_processes.py stale_processes.py scaling.py checkpoint_drivers.py out_of_memory.py divided_update.py \
	divided_gradients.py offload.py)

# Whatever the environment says: else each of hundreds of processes compiles what it imports.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup demo lint docs tables check-fast check test gpu clean

setup: .setup-stamp

.setup-stamp: pyproject.toml studies/pyproject.toml constraints.txt
	$(PYTHON) scripts/setup.py $(VENV)
	touch .setup-stamp

demo: setup
	$(BIN)/spantrain demo --out runs/demo

lint: setup
	$(BIN)/ruff format --check src studies tests benchmarks scripts
	$(BIN)/ruff check src studies tests benchmarks scripts
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/structure.py

# The site, in build/docs; a link that leads nowhere fails.
docs: setup
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs

check-fast: lint
	$(BIN)/pytest -n 2 --dist loadfile -m "not slow" $(PURE)

tables: setup
	$(BIN)/python benchmarks/paper_tables.py --check

# Side by side, each output in one piece.
check: setup
	$(MAKE) --no-print-directory -j 2 -O lint docs tables

test: check
	$(BIN)/pytest -n 3 --dist loadfile

# On a machine with an accelerator: what needs one, what runs on any, and figures.
gpu: setup
	$(BIN)/pytest -m gpu
	$(BIN)/pytest -v --tb=short -n 4 --dist loadfile --backend $(BACKEND) $(ON_ANY_BACKEND)
	$(BIN)/python benchmarks/gpu.py --backend $(BACKEND) --out gpu

clean:
	rm -rf $(VENV) .setup-stamp runs build dist
