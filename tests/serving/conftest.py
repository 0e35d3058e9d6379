"""What the tests of whole deployments share: the real tokenizer, a text to cut prompts from, the oracle that judges
what is written, and how KV travels.

A deployment takes seconds to start, so in one run each file has them over one transport, and its neighbour over the
other; with HEADRACE_TRANSPORTS=mapped,tcp each has them over both.
"""

import os
from pathlib import Path

import pytest
from oracle import Oracle
from tokenizers import Tokenizer

LICENCE = Path(__file__).resolve().parents[2] / "LICENSE"
TRANSPORTS = ("tcp", "mapped")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`transport` is what --require-provider takes."""
    if "transport" in metafunc.fixturenames:
        asked = os.environ.get("HEADRACE_TRANSPORTS")
        transports = asked.split(",") if asked else [in_turn(Path(metafunc.module.__file__))]
        metafunc.parametrize("transport", transports, scope="module")


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
