# Every target makes the environment it needs: a fresh clone needs Python 3.11 and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-slow check bench clean

demo: $(VENV)/.all
	$(BIN)/eplb demo $(ARGS)

test: $(VENV)/.dev
	$(BIN)/pytest $(ARGS)

test-slow: $(VENV)/.dev
	$(BIN)/pytest -m slow --timeout 1800 $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/plan.py
	$(BIN)/python benchmarks/thread.py

# torch first and alone: a CPU build of the pinned version is as good as any other.
$(VENV)/.all: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) --editable '.[all]'
	touch $@

$(VENV)/.dev: $(VENV)/.all
	$(PIP) --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .eplb .mypy_cache .ruff_cache .pytest_cache
