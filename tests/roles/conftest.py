"""One tiny checkpoint, and what it writes, for all tests of the room."""

from pathlib import Path

import pytest
import torch
from tiny_checkpoint import Reference, write_checkpoint

from headrace.roles.options import Transport

torch.set_num_threads(1)  # the tests run on two cores, beside each other


@pytest.fixture(params=["mapped", "tcp"])
def transport(request: pytest.FixtureRequest) -> Transport:
    """What is sent from one instance to another goes over each."""
    transport: Transport = request.param
    return transport


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)
