# make serve       set-up, then an OpenAI-compatible server on this machine; ARGS='--port 9000' for its options
# make test        set-up (first run: minutes, later: a fraction of a second), then all tests; ARGS='-k pages' for some
# make check       what a change must pass: format, lint, types, import contract, tests
# make soak        a hundred thousand random histories of the messenger (about ten minutes)
# make sanitize    the tests of the native modules, in a build of their own that traps wrong addresses and undefined
#                  behaviour; SANITIZERS=thread for races instead (minutes, the first time more)
# make bench       the benchmarks, one after another; nothing else should run
# make format      rewrite Python and C++ in the house's form
# make clean       remove what was built; make distclean: the virtual environment too

PYTHON     ?=
WORKERS    ?= 2
ARGS       ?=
SANITIZERS ?= address,undefined

BIN    := .venv/bin
NATIVE := $(wildcard src/headrace/*/native/*.h src/headrace/*/native/*.cpp)

.DEFAULT_GOAL := test
.NOTPARALLEL:
.PHONY: setup serve test soak sanitize bench check format clean distclean
.PHONY: lint lint-format lint-style lint-types lint-imports

setup:
	@PYTHON='$(PYTHON)' tools/setup

serve: setup
	@$(BIN)/headrace serve $(ARGS)

test: setup
	@WORKERS='$(WORKERS)' tools/test $(ARGS)

soak: setup
	HEADRACE_HISTORIES=100000 $(BIN)/python -m pytest -n $(WORKERS) tests/messenger/test_random_histories.py $(ARGS)

sanitize: setup
	@SANITIZERS='$(SANITIZERS)' WORKERS='$(WORKERS)' tools/sanitize $(ARGS)

bench: setup
	@for script in benchmarks/[a-z]*.py; do echo "== $$script"; $(BIN)/python $$script || exit; done

# Apart, so that `make -k lint` shows everything there is to mend.
lint: lint-format lint-style lint-types lint-imports

lint-format: setup
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(NATIVE)

lint-style: setup
	$(BIN)/ruff check .

lint-types: setup
	$(BIN)/mypy

lint-imports: setup
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
