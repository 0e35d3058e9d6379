"""CUDA memory without a device: what is refused, and what a driver made of memory files shows of maps and copies."""

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import FabricError, InputError
from headrace.fabric import CudaMemory, NativeFabric, SharedMemory

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def library_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("fake-cuda")
    source, built = HERE / "fake_libcuda.c", folder / "libcuda.so.1"
    subprocess.run(["cc", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", built, source], check=True)
    return str(folder)


def run_side(act: str, library_path: str) -> Any:
    environment = {**os.environ, "LD_LIBRARY_PATH": library_path}
    command = [sys.executable, str(HERE / "cuda_side.py"), act]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.fixture(scope="module")
def one(library_path: str) -> Any:
    return run_side("one", library_path)


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@pytest.mark.skipif(has_driver(), reason="this machine has a CUDA driver")
def test_without_a_driver_the_error_names_the_library() -> None:
    memory = SharedMemory(4096)
    for act in (
        lambda: CudaMemory(4096),
        lambda: NativeFabric(memory.fd, 4096, cuda_device=0, transports=("mapped",)),
    ):
        with pytest.raises(FabricError, match=r"CUDA memory needs the driver's library: libcuda\.so\.1"):
            act()


def test_wrong_arguments_are_refused_before_a_driver_is_looked_for() -> None:
    memory = SharedMemory(4096)
    with pytest.raises(InputError, match="num_bytes: must be at least 1, is 0"):
        CudaMemory(0)
    with pytest.raises(InputError, match="transports: must be of mapped, efa and verbs for CUDA memory"):
        NativeFabric(memory.fd, 4096, cuda_device=0)


def test_pages_travel_between_device_memories_and_none_after_a_revoke(one: Any) -> None:
    assert one["failed"] == 0
    assert one["landed"], "whole when it is told, whatever the source became after its transfer's end"
    assert not one["others"]
    assert one["layer"] == [[0xEE], [0xEE], [0]], (
        "each layer is there when it is told, though the next is still to come"
    )
    assert not one["revoked_at_once"] and one["after_revoke"] == 0
    assert one["to_host"], "a device writes into host memory too"
    assert one["pending"] == 0, "nor after its transfer was closed"
    assert one["left_behind"] == [0, 0, 0, 0]


def test_what_cannot_be_done_with_device_memory_is_refused(one: Any) -> None:
    assert one["digest"] == one["digests"] == "num_pages: must be 0: CUDA memory has no digests"
    assert one["from_host"].startswith("descriptor.addressing: is CUDA memory")
    assert one["device"] == "cuda_device: must be one of the 2 visible here, is 2"


def test_another_process_imports_the_memory_and_lets_go_of_it(library_path: str) -> None:
    told = run_side("two", library_path)
    assert told["arrivals"] == 64 and told["landed"] and not told["revoked_at_once"]
    assert told["left_behind"] == told["writer"] == [0, 0, 0, 0]
