# The first run of `demo` or `test` makes .venv and fetches the default model; later runs redo neither.

PYTHON ?= python3
PYTEST_ARGS ?=

BIN := .venv/bin
INSTALLED := .venv/.installed-$(shell uname -m)
SOURCES := setup.py pyproject.toml constraints.txt $(wildcard src/graft/tree/*.c src/graft/tree/native/*.c src/graft/tree/native/round/*.c) $(wildcard src/graft/model/*.c)

DOCS := .venv-docs
DOCS_INSTALLED := $(DOCS)/.installed-$(shell uname -m)

.PHONY: help demo test suite test-newest sanitize lint docs model setup clean

help:  ## Show this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/make \1\t\2/p' Makefile | expand -t 20

demo: model  ## See it work: the same text, faster
	@$(BIN)/graft demo

test: $(INSTALLED)  ## Everything that must pass; PYTEST_ARGS="-k tree" narrows it
	@$(MAKE) --no-print-directory -j2 --output-sync lint model
	@$(MAKE) --no-print-directory suite

suite: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist worksteal $(PYTEST_ARGS)

test-newest:  ## The same with the newest release of everything but torch; TORCH=torch takes its newest too
	@$(PYTHON) tests/newest.py

sanitize: $(INSTALLED)  ## Tests of native code under ASan and UBSan (needs GCC): minutes; PYTEST_ARGS narrows it
	@$(BIN)/python tests/sanitize.py $(PYTEST_ARGS)

lint: $(INSTALLED)  ## Style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(DOCS_INSTALLED)  ## The documentation as a site, in docs/_build; a link that leads nowhere is an error
	$(DOCS)/bin/sphinx-build -q -W --keep-going docs docs/_build
	@echo "open docs/_build/index.html"

model: $(INSTALLED)  ## Fetch the default model
	@$(BIN)/graft pull > /dev/null

setup: $(INSTALLED)  ## Make .venv with the tested versions; PYTHON=python3.12 chooses another Python

$(INSTALLED): $(SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "error: Graft needs Python 3.11 or newer: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "Setting up .venv, once; this takes a few minutes"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e ".[dev]"
	@# Bytecode halves the time of a command. pip would make it on one core; a file for a newer Python gets none.
	@$(BIN)/python -m compileall -qq -j 4 -x /tests/ .venv/lib src || true
	@touch $@

$(DOCS_INSTALLED): pyproject.toml
	@$(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip install --quiet 'furo>=2025.12' 'myst-parser>=5.1,<6' 'sphinx>=9,<10'
	@touch $@

clean:  ## Remove caches and build leftovers; .venv and models stay
	rm -rf build dist docs/_build src/*.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
