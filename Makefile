# Every target makes its own environment in .venv, with the versions of constraints.txt, when it is first needed
# and again when pyproject.toml or constraints.txt have changed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
FAST := cli partitioning program schedules simulation tensors testing viz

# Both say the same, to older and to newer versions of pip: what a build pulls in is pinned too.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-fast check gallery bench clean

help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/demo ## Train a small GPT through a pipeline and draw what happened.
	$(BIN)/python examples/train_gpt.py $(ARGS)

test: $(VENV)/develop ## Run the tests, three at a time; ARGS="-k name" chooses some.
	$(BIN)/python -m pytest -n 3 --dist worksteal $(ARGS)

test-fast: $(VENV)/develop ## Run what most changes need, in about a minute: schedules, simulation, partitioning, pictures.
	$(BIN)/python -m pytest -n 2 --dist worksteal $(addprefix tests/,$(FAST)) $(ARGS)

check: $(VENV)/develop ## Lint, format, types, layers, private imports, the gallery.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m pytest -q tests/repo/test_private_torch.py
	$(BIN)/python docs/gallery.py --check

gallery: $(VENV)/develop ## Write docs/schedules.md: every schedule with its picture and figures.
	$(BIN)/python docs/gallery.py

bench: $(VENV)/bench ## Run every benchmark in turn.
	@set -e; for file in $$(grep -l __main__ benchmarks/*.py); do \
		echo "== $$file"; $(BIN)/python "$$file" $(ARGS); \
	done

clean: ## Remove the environment and everything that was built or cached.
	rm -rf $(VENV) build runs *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo 'pipesched needs Python 3.11 or newer; "$(PYTHON)" is' "$$($(PYTHON) --version 2>&1);" \
			'install a newer one, or name it: make PYTHON=python3.12' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# Each of these is an empty file that stands for the environment with some of the optional dependencies.
$(VENV)/demo: EXTRAS := demo
$(VENV)/develop: EXTRAS := check,test,demo,zoo
$(VENV)/bench: EXTRAS := bench,zoo
$(VENV)/demo $(VENV)/develop $(VENV)/bench: pyproject.toml constraints.txt | $(VENV)/made
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@
