# Every target sets up .venv by itself; a set-up that is already there is left alone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-all check format docs pictures bench clean
.DELETE_ON_ERROR:

demo: $(READY)  ## the main job: train, measure, show
	$(BIN)/paceline demo

test: $(READY)  ## every test that needs only Python and the package index
	$(BIN)/python -m tests -m "not external"

test-all: $(READY)  ## also emulated clusters, ssh, SLURM, Ray, browsers, GPUs, real data; CI runs this
	$(BIN)/python -m pytest

check: $(READY)  ## lint, format, types, layers: what people and CI run
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(READY)  ## the pages that are written from the code
	$(BIN)/python -m paceline.cli.config_flags > docs/config.md.new && mv docs/config.md.new docs/config.md

pictures: $(READY)  ## those of docs/, of the newest demo and the live page; needs chromium and its driver
	$(BIN)/python -m tests.ui.pictures

bench: $(READY)  ## every benchmark, one after the other, each printing its table
	@for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

# pip, and not another installer, because constraints.txt pins the CPU build of torch that pip finds.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "paceline needs Python 3.11 or newer: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@echo "installing paceline and its dependencies into $(VENV) (a few minutes on the first run)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools wheel
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
