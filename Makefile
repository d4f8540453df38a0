# Every target makes the environment it needs: a fresh clone needs Python 3.11 and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

ENGINES := vllm sglang
# Releases with the same structure, beside those of tests/engines/ENGINE.txt.
RELEASES := vllm==0.31.0 vllm==0.32.0 sglang==0.5.21 sglang==0.5.22
# ENVIRONMENT[,ENGINE]: its pytest. Each engine wants another numba, and numba's files of one version
# replace those of another: an engine's environments keep theirs apart from those beside the source.
pytest_in = NUMBA_CACHE_DIR=$(CURDIR)/.venv-$(or $(2),$(1))/numba .venv-$(1)/bin/python -m pytest -W default

# Tests start hundreds of processes: each would compile the project's modules again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-all test-slow test-gpu test-engines test-engines-smoke test-engines-releases newest-engines test-engines-served check bench scorecard clean

demo: $(VENV)/.all
	$(BIN)/eplb demo $(ARGS)

# As many workers as there are cores, file by file: a file's tests share what they start. A worker
# that a hung test ends is not replaced: its replacement would run that test again, for ever.
PYTEST := $(BIN)/pytest -n auto --dist loadfile --no-loadscope-reorder --max-worker-restart=0

# Every decision, every contract, and one whole journey, on what pip brings.
test: $(VENV)/.dev
	$(PYTEST) $(ARGS)

# Everything that needs neither a GPU nor an engine's wheel: browsers, clusters, deaths, documents.
test-all: $(VENV)/.dev
	$(PYTEST) -m "not slow and not gpu" $(ARGS)

# Soaks: a hang is found after an hour.
test-slow: $(VENV)/.dev
	$(BIN)/pytest -m slow -o faulthandler_timeout=3600 $(ARGS)

# With the GPU host's own Python and torch, and the deep_ep that is installed there: no environment
# is made, and neither web nor solver libraries are needed.
test-gpu:
	PYTHONPATH=$(CURDIR):$$PYTHONPATH $(PYTHON) -m pytest -c /dev/null --rootdir=. -p no:cacheprovider \
		-W "ignore::pytest.PytestUnknownMarkWarning" -ra -q tests/gpu $(ARGS)

# The real wheels of serving engines, on a CPU: each in an environment of its own.
test-engines: $(ENGINES:%=.venv-%/packages.txt)
	for engine in $(ENGINES); do \
		$(call pytest_in,$$engine) -m "not gpu" -o faulthandler_timeout=3600 tests/engines/test_*.py tests/engines/$$engine $(ARGS) || exit 1; \
	done

# The same with each release that loads, in environments that share all packages but the engine.
test-engines-releases: $(ENGINES:%=.venv-%/packages.txt)
	for release in $(RELEASES); do \
		engine=$${release%%==*}; number=$${release##*==}; \
		tests/engines/environment.sh $$engine $$number || exit 1; \
		$(call pytest_in,$$engine-$$number,$$engine) -m "not gpu" -o faulthandler_timeout=3600 tests/engines/test_*.py tests/engines/$$engine $(ARGS) || exit 1; \
	done

# What of each engine's newest wheel the plug-in does not have: a report, which fails nothing.
newest-engines: $(VENV)/.dev
	$(BIN)/python -m tests.engines.newest

# A part of them for CI, within four minutes: what another release of an engine would break first.
test-engines-smoke: .venv-vllm/packages.txt
	$(call pytest_in,vllm) -m "not gpu" tests/engines/test_guards.py tests/engines/test_used_symbols.py \
		tests/engines/vllm/test_conform.py tests/engines/vllm/test_guards.py tests/engines/vllm/test_groups.py $(ARGS)

# vLLM's CPU build serves a tiny model with the plug-in; minutes.
test-engines-served: .venv-served/packages.txt
	$(call pytest_in,served) -m slow tests/engines/vllm/test_served.py $(ARGS)

.venv-%/packages.txt: pyproject.toml tests/engines/%.txt tests/engines/environment.sh
	PYTHON=$(PYTHON) tests/engines/environment.sh $*

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks.planner.plan
	$(BIN)/python -m benchmarks.ranks.thread
	$(BIN)/python -m benchmarks.ranks.death
	$(BIN)/python -m benchmarks.migration.migrate
	$(BIN)/python -m benchmarks.migration.preload
	$(BIN)/python -m benchmarks.demo
	$(BIN)/python -m benchmarks.telemetry.costs
	$(BIN)/python -m benchmarks.telemetry.disk

# With each release: how far the simulator's times are from measured ones.
scorecard: $(VENV)/.dev
	$(PIP) --editable '.[calibrate]'
	$(BIN)/python -m benchmarks.fidelity --check
	$(BIN)/python -m benchmarks.fidelity.links
	$(BIN)/python -m benchmarks.fidelity.own_kernel

# torch first and alone: a CPU build of the pinned version is as good as any other.
$(VENV)/.all: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) --editable '.[all]'
	$(BIN)/eplb compile  # here, and neither inside a demo nor inside a test's time limit
	touch $@

$(VENV)/.dev: $(VENV)/.all
	$(PIP) --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .eplb .mypy_cache .ruff_cache .pytest_cache
