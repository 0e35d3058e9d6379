"""A byte that has just landed in the KV memory of another process is flipped; what lies there already is left alone."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from headrace.cli.chaos import memory
from headrace.cli.chaos.evidence import pool_of
from headrace.cli.chaos.memory import Landings, flip_a_landed_byte

BYTES = 1 << 20
DECODER = f"""
import mmap, os, sys
fd = os.memfd_create("headrace-kv")
os.ftruncate(fd, {BYTES})
pool = mmap.mmap(fd, {BYTES})
pool[:4096] = bytes([7]) * 4096
print("there", flush=True)
sys.stdin.readline()
pool[8192:{BYTES} - 4096] = bytes([5]) * ({BYTES} - 12288)
sys.stdin.readline()
"""


@pytest.fixture
def decoder() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", DECODER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None and process.stdout.readline() == "there\n"
        yield process
        process.kill()


def land(decoder: subprocess.Popen[str]) -> None:
    assert decoder.stdin is not None
    decoder.stdin.write("land\n")
    decoder.stdin.flush()


def test_one_byte_of_what_lands_is_flipped(decoder: subprocess.Popen[str]) -> None:
    threading.Timer(0.1, land, [decoder]).start()
    assert flip_a_landed_byte(decoder.pid)
    pool = pool_of(decoder.pid)
    assert pool[:4096] == bytes([7]) * 4096
    landed = pool[8192 : BYTES - 4096]
    assert sum(byte != 5 for byte in landed) == 1 and landed[0] == 5 ^ memory.FLIP


def test_where_nothing_lands_nothing_is_flipped(
    decoder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "LANDS_WITHIN_S", 0.1)
    assert not flip_a_landed_byte(decoder.pid)
    assert pool_of(decoder.pid)[:] == bytes([7]) * 4096 + bytes(BYTES - 4096)


def test_what_lands_is_seen_once_there_is_enough_of_it(decoder: subprocess.Popen[str]) -> None:
    with Landings() as landings:
        assert not landings.has_landed(decoder.pid) and not landings.has_landed(decoder.pid)
        land(decoder)
        until = time.monotonic() + 10.0
        while not landings.has_landed(decoder.pid):
            assert time.monotonic() < until
        with Landings() as later:
            assert not later.has_landed(decoder.pid) and not later.has_landed(decoder.pid)
