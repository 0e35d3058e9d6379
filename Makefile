# make serve       set-up, then an OpenAI-compatible server on this machine; ARGS='--port 9000' for its options
# make test        set-up (first run: minutes, later: a fraction of a second), then all tests; ARGS='-k pages' for some
# make check       what a change must pass: format, lint, types, import contract, tests
# make test-hosts  the tests across two hosts made of network namespaces (root, or users who may make some; minutes)
# make test-transports  whole deployments over each transport; `make test` has some over one, some over the other
# make test-matrix  prefillers and decoders of all degrees over each transport; a table of what each rank sent, which
#                  HEADRACE_TABLE=FILE keeps (half an hour)
# make soak        a hundred thousand random histories of the messenger, and 24 GiB over each transport with readers
#                  that are killed in the middle (half an hour)
# make chaos       every fault in every state of a request, made in running deployments over each transport
#                  (ARGS='--faults link-cut', TRANSPORTS=tcp; three quarters of an hour)
# make soak-serving  drawn faults under load for half an hour, or MINUTES=5, over each transport
# make sanitize    the tests of the native modules, in a build of their own that traps wrong addresses and undefined
#                  behaviour; SANITIZERS=thread for races instead (minutes, the first time more)
# make fuzz        what parses a peer's bytes, fed by fuzzers for SECONDS_EACH=60 each (clang++; ARGS='lane' for one)
# make bench       the benchmarks, one after another; nothing else should run
# make format      rewrite Python and C++ in the house's form
# make clean       remove what was built; make distclean: the virtual environment too

PYTHON     ?=
WORKERS    ?= 2
ARGS       ?=
SANITIZERS ?= address,undefined
MINUTES    ?= 30

BIN    := .venv/bin
NATIVE := $(shell find src -path "*/native/*" -name "*.h" -o -path "*/native/*" -name "*.cpp")

.DEFAULT_GOAL := test
.NOTPARALLEL:
.PHONY: setup serve test test-hosts test-transports test-matrix chaos soak soak-serving sanitize fuzz bench check format clean distclean
.PHONY: lint lint-format lint-style lint-types lint-imports

setup:
	@PYTHON='$(PYTHON)' tools/setup

serve: setup
	@$(BIN)/headrace serve $(ARGS)

test: setup
	@WORKERS='$(WORKERS)' tools/test $(ARGS)

test-hosts: setup
	@$(BIN)/python -m pytest -m hosts tests/hosts $(ARGS)

test-transports: setup
	HEADRACE_TRANSPORTS=mapped,shm,tcp $(BIN)/python -m pytest -m serving -o faulthandler_timeout=900 tests/serving $(ARGS)

test-matrix: setup
	HEADRACE_TRANSPORTS=mapped,shm,tcp $(BIN)/python -m pytest -m matrix -o faulthandler_timeout=900 \
	    tests/serving/test_whole_matrix.py $(ARGS)

soak: setup
	HEADRACE_HISTORIES=100000 HEADRACE_SOAK_GIB=24 $(BIN)/python -m pytest -n $(WORKERS) -o timeout=3600 -o faulthandler_timeout=7200 \
	    tests/messenger/test_random_histories.py tests/fabric/test_native_soak.py $(ARGS)

chaos: setup
	@tools/chaos $(ARGS)

soak-serving: setup
	@tools/chaos --minutes $(MINUTES) $(ARGS)

sanitize: setup
	@SANITIZERS='$(SANITIZERS)' WORKERS='$(WORKERS)' tools/sanitize $(ARGS)

fuzz: setup
	@tools/fuzz $(ARGS)

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
