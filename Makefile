# make test   set-up (first run: minutes, later: a fraction of a second), then all tests
# make check  what a change must pass: format, lint, types, import contract, tests
# make format / make clean (build outputs) / make distclean (the environment too)

PYTHON  ?=
WORKERS ?= 2
ARGS    ?=

BIN    := .venv/bin
NATIVE := $(wildcard src/headrace/*/native/*.h src/headrace/*/native/*.cpp)

.DEFAULT_GOAL := test
.NOTPARALLEL:
.PHONY: setup test lint check format clean distclean

setup:
	@PYTHON='$(PYTHON)' tools/setup

# Tests that measure time run by themselves, after the others.
test: setup
	$(BIN)/python -m pytest -n $(WORKERS) -m 'not timing' $(ARGS)
	$(BIN)/python -m pytest -m timing $(ARGS)

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(NATIVE)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

check: lint test

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix --exit-zero .
	$(BIN)/clang-format -i $(NATIVE)

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .venv/.headrace/native
	find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv
