# Two commands do everything on a fresh clone: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PURE := tests/schedule tests/adaptation tests/cost tests/config tests/outer/policy src/spantrain/core src/spantrain/cost \
	src/spantrain/schedule src/spantrain/formats src/spantrain/adaptation

.PHONY: setup demo lint check-fast check test clean

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

check-fast: lint
	$(BIN)/pytest -n 2 --dist loadfile -m "not slow" $(PURE)

check: lint
	$(BIN)/python benchmarks/paper_tables.py --check

test: check
	$(BIN)/pytest -n 2 --dist loadfile

clean:
	rm -rf $(VENV) .setup-stamp runs build dist
