"""What the tests of whole deployments share: the real tokenizer, and a text to cut prompts from."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

LICENCE = Path(__file__).resolve().parents[2] / "LICENSE"


@pytest.fixture(scope="session")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2 / "tokenizer.json"))


@pytest.fixture(scope="session")
def licence_ids(tokenizer: Tokenizer) -> list[int]:
    """Some 2,200 tokens of English that do not change from day to day."""
    ids: list[int] = tokenizer.encode(LICENCE.read_text()).ids
    return ids
