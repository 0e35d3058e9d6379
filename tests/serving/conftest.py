"""What the tests of whole deployments share: the real tokenizer, a text to cut prompts from, the oracle that judges
what is written, and how KV travels.

A deployment takes seconds to start, so in one run each file has them over one transport, and its neighbour over the
other, unless it names its TRANSPORT; with HEADRACE_TRANSPORTS=mapped,tcp each has them over both.
"""

import os
from pathlib import Path
from types import ModuleType

import pytest
from matrix_table import Shows, table
from oracle import Oracle
from tokenizers import Tokenizer

LICENCE = Path(__file__).resolve().parents[2] / "LICENSE"
TRANSPORTS = ("tcp", "mapped")
SHOWS = pytest.StashKey[Shows]()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`transport` is what --require-provider takes."""
    if "transport" in metafunc.fixturenames:
        asked = os.environ.get("HEADRACE_TRANSPORTS")
        transports = asked.split(",") if asked else [own_transport(metafunc.module)]
        metafunc.parametrize("transport", transports, scope="module")


def own_transport(module: ModuleType) -> str:
    named: str | None = getattr(module, "TRANSPORT", None)
    return named or in_turn(Path(str(module.__file__)))


def in_turn(file: Path) -> str:
    neighbours = sorted(file.parent.glob("test_*.py"))
    return TRANSPORTS[neighbours.index(file) % len(TRANSPORTS)]


@pytest.fixture(scope="session")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2 / "tokenizer.json"))


@pytest.fixture(scope="session")
def oracle(smollm2: Path) -> Oracle:
    return Oracle(smollm2)


@pytest.fixture(scope="session")
def licence_ids(tokenizer: Tokenizer) -> list[int]:
    """Some 2,200 tokens of English that do not change from day to day."""
    ids: list[int] = tokenizer.encode(LICENCE.read_text()).ids
    return ids


@pytest.fixture(scope="session")
def shows(pytestconfig: pytest.Config) -> Shows:
    """What the matrix showed so far."""
    return pytestconfig.stash.setdefault(SHOWS, {})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The matrix as a table, for docs/measurements.md; HEADRACE_TABLE names a file for it."""
    if shown := config.stash.get(SHOWS, {}):
        rows = table(shown)
        terminalreporter.section("clear prompts right; KiB by source rank; seconds")
        terminalreporter.write_line("\n".join(rows))
        if file := os.environ.get("HEADRACE_TABLE"):
            Path(file).write_text("\n".join(rows) + "\n")
