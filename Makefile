# Two commands do everything on a fresh clone: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup demo check test clean

setup: .setup-stamp

.setup-stamp: pyproject.toml constraints.txt
	$(PYTHON) scripts/setup.py $(VENV)
	touch .setup-stamp

demo: setup
	$(BIN)/spantrain demo --out runs/demo

check: setup
	$(BIN)/ruff format --check src studies tests benchmarks scripts
	$(BIN)/ruff check src studies tests benchmarks scripts
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/structure.py
	$(BIN)/python benchmarks/paper_tables.py --check

test: check
	$(BIN)/pytest -n 2 --dist loadfile

clean:
	rm -rf $(VENV) .setup-stamp runs build dist
