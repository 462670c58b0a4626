# `make demo` runs the main job, `make test` the checks and all tests, `make quick` the tests that need no patience,
# `make docs` builds the site into site/. All create the virtual environment and install into it when it is missing.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Tests start some hundred processes: with bytecode none of them compiles the library again.
PYTEST = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= \
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := test
.PHONY: demo test quick lint style types tests docs

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test,demo,docs]'
	touch $@

demo: $(STAMP)
	$(BIN)/python examples/train_gpt.py

docs: $(STAMP)
	$(BIN)/python -m mkdocs build

lint: style types

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

tests: $(STAMP)
	$(PYTEST)

# mypy runs on one core, and tests wait for one another: both together are done sooner than one after the other.
test: style
	$(MAKE) --no-print-directory --jobs 2 types tests

# While editing: neither other packages nor processes, and nothing that takes long. All of tests/hf needs transformers,
# whose trainer takes seconds to import.
quick: $(STAMP)
	$(PYTEST) --ignore tests/hf -m "not (gpu or inductor or processes or slow or solver or transformers)"
