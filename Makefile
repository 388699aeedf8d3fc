# Targets create .venv with the versions in constraints.txt when they first need it, and update it after
# pyproject.toml or constraints.txt change.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
FAST := cli partitioning program schedules simulation tensors testing viz

# Pin build dependencies too. Older and newer versions of pip read different variables.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Keep compiled modules, also where images of containers set this: tests start dozens of interpreters.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all test-fast check gallery bench clean

help: ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/demo ## Train a small GPT through a pipeline, and report and draw a step.
	$(BIN)/python examples/train_gpt.py $(ARGS)

test: $(VENV)/develop ## Run the tests, three at a time; ARGS="-k name" selects some.
	$(BIN)/python -m pytest -n 3 --dist worksteal $(ARGS)

test-all: $(VENV)/develop ## Run all tests with every case of them, also those that `make test` leaves out.
	$(BIN)/python -m pytest -n 3 --dist worksteal --exhaustive $(ARGS)

test-fast: $(VENV)/develop ## Run the tests of schedules, simulation, partitioning and pictures, in about a minute.
	$(BIN)/python -m pytest -n 2 --dist worksteal $(addprefix tests/,$(FAST)) $(ARGS)

check: $(VENV)/develop ## Check lint, format, types, imports between packages, uses of torch's private API, and the gallery.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m pytest -q tests/repo/test_private_torch.py
	$(BIN)/python docs/gallery.py --check

gallery: $(VENV)/develop ## Write docs/schedules.md, with a picture and figures of every schedule.
	$(BIN)/python docs/gallery.py

bench: $(VENV)/bench ## Run all benchmarks.
	@set -e; for file in $$(grep -l __main__ benchmarks/*.py); do \
		echo "== $$file"; $(BIN)/python "$$file" $(ARGS); \
	done

clean: ## Remove the environment, build outputs and caches.
	rm -rf $(VENV) build runs *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo 'pipesched needs Python 3.11 or newer; "$(PYTHON)" is' "$$($(PYTHON) --version 2>&1);" \
			'install a newer one, or pass its name: make PYTHON=python3.12' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# Each of these empty files marks that .venv has the optional dependencies of one target.
$(VENV)/demo: EXTRAS := demo
$(VENV)/develop: EXTRAS := check,test,demo,zoo
$(VENV)/bench: EXTRAS := bench,zoo
$(VENV)/demo $(VENV)/develop $(VENV)/bench: pyproject.toml constraints.txt | $(VENV)/made
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@
