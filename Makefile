# Targets create .venv with the versions in constraints.txt when they first need it, and update it after
# pyproject.toml or constraints.txt change. `make test TORCH=2.15.0` does the same in .venv-torch-2.15.0, with that
# version of torch.

PYTHON ?= python3
DEFAULT_TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
# The newest version of torch that is tested. It is written down, so that a verdict does not depend on the day.
NEWEST_TORCH := 2.15.0
# The versions that `make matrix` tests.
TORCHES := 2.11.0 $(DEFAULT_TORCH) 2.14.1 $(NEWEST_TORCH)
TORCH ?= $(DEFAULT_TORCH)

ifeq ($(TORCH),$(DEFAULT_TORCH))
VENV := .venv
CONSTRAINTS := constraints.txt
else
VENV := .venv-torch-$(TORCH)
CONSTRAINTS := $(VENV)/constraints.txt
# A configuration file of pip may hold torch at another version. pip's environment variables, such as an index, stay.
export PIP_CONFIG_FILE := /dev/null
endif
BIN := $(VENV)/bin
FAST := cli partitioning program schedules simulation tensors testing viz

# Pin build dependencies too. Older and newer versions of pip read different variables.
export PIP_CONSTRAINT := $(CONSTRAINTS)
export PIP_BUILD_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Keep compiled modules, also where images of containers set this: tests start dozens of interpreters.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all test-fast matrix smoke check gallery bench gpu release clean environment torch-version

help: ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/demo ## Train a small GPT through a pipeline, and report and draw a step.
	$(BIN)/python examples/train_gpt.py $(ARGS)

test: torch-version ## Run the tests, three at a time; ARGS="-k name" selects some, TORCH=2.15.0 another torch.
	$(BIN)/python -m pytest -n 3 --dist worksteal $(ARGS)

test-all: torch-version ## Run all tests with every case of them, also those that `make test` leaves out.
	$(BIN)/python -m pytest -n 3 --dist worksteal --exhaustive $(ARGS)

test-fast: torch-version ## Run the tests of schedules, simulation, partitioning and pictures, in about a minute.
	$(BIN)/python -m pytest -n 2 --dist worksteal $(addprefix tests/,$(FAST)) $(ARGS)

matrix: ## Run the tests with several versions of torch, the oldest and the newest among them.
	@mkdir -p runs/matrix; rm -f runs/matrix/*; \
	for version in $(TORCHES); do \
		echo "== torch $$version"; \
		{ $(MAKE) --no-print-directory test TORCH=$$version || touch runs/matrix/$$version.failed; } 2>&1 \
			| tee runs/matrix/$$version.log; \
	done; \
	for version in $(TORCHES); do \
		printf 'torch %s: ' "$$version"; \
		grep -E '(passed|failed|error).* in [0-9.]+s' runs/matrix/$$version.log | tail -1 | tr -d '=' | grep . \
			|| echo 'no test ran'; \
	done; \
	! ls runs/matrix/*.failed 2>/dev/null

smoke: ## Run a few tests with the newest torch, if it can be installed within 15 minutes.
	@if timeout 900 $(MAKE) --no-print-directory environment TORCH=$(NEWEST_TORCH); then \
		$(MAKE) --no-print-directory test TORCH=$(NEWEST_TORCH) ARGS='-m smoke --exhaustive $(ARGS)' \
			&& echo 'smoke: the tests ran with torch $(NEWEST_TORCH)'; \
	else \
		echo 'smoke: no test ran, because torch $(NEWEST_TORCH) could not be installed within 15 minutes'; \
	fi

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

gpu: ## Run tests and benchmarks on this machine's GPUs, write runs/gpu/report.md; ARGS="--parts 2 3" runs some.
	PYTHONPATH=.$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) benchmarks/gpu_report.py $(ARGS)

release: $(VENV)/release ## Build sdist and wheel, check them, install the wheel in an empty environment, and train there.
	rm -rf dist build/lib build/bdist.* runs/installed
	$(BIN)/python -m build --quiet --outdir dist
	$(BIN)/twine check --strict dist/*
	$(BIN)/python .ci/check_archives.py dist
	$(PYTHON) -m venv runs/installed
	@runs/installed/bin/python -m pip install --quiet --no-compile 'torch==$(TORCH)+cpu' 2>/dev/null \
		|| echo 'no index offers a CPU build of torch $(TORCH)'
	runs/installed/bin/python -m pip install --quiet --no-compile 'pipesched[safetensors] @ file://$(CURDIR)/'$$(echo dist/*.whl)
	cd runs && PATH="$(CURDIR)/runs/installed/bin:$$PATH" installed/bin/python -I $(CURDIR)/.ci/try_installed.py

clean: ## Remove the environment, build outputs and caches.
	rm -rf .venv .venv-torch-* build dist runs *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo 'pipesched needs Python 3.11 or newer; "$(PYTHON)" is' "$$($(PYTHON) --version 2>&1);" \
			'install a newer one, or pass its name: make PYTHON=python3.12' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# Some versions of torch need an older setuptools.
$(VENV)/constraints.txt: constraints.txt | $(VENV)/made
	{ grep -vE '^(torch|setuptools)==' constraints.txt; echo 'torch==$(TORCH)'; } > $@

environment: $(VENV)/develop

torch-version: $(VENV)/develop
	@$(BIN)/python -c 'import sys, torch; version = str(torch.__version__).partition("+")[0]; sys.exit( \
		version != "$(TORCH)" and f"the environment $(VENV) has torch {version} instead of $(TORCH); remove it")'

# Each of these empty files marks that the environment has the optional dependencies of one target.
# Where an index offers a CPU build of torch (a version that ends in +cpu), that build is installed first, and pip keeps
# it: it is a tenth of the size of a CUDA build. Elsewhere pip installs the build that its index has for this system.
$(VENV)/demo: EXTRAS := demo
$(VENV)/develop: EXTRAS := check,test,demo,zoo,hf
$(VENV)/bench: EXTRAS := bench,zoo
$(VENV)/release: EXTRAS := release
$(VENV)/demo $(VENV)/develop $(VENV)/bench $(VENV)/release: pyproject.toml $(CONSTRAINTS) | $(VENV)/made
	@$(BIN)/python -m pip install --quiet 'torch==$(TORCH)+cpu' 2>/dev/null \
		|| echo 'no index offers a CPU build of torch $(TORCH)'
	$(BIN)/python -m pip install --quiet -c $(CONSTRAINTS) -e '.[$(EXTRAS)]'
	@touch $@
