"""A byte that has just landed in the KV memory of another process is flipped; what lies there already is left alone."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from answering_gateway import instance

from headrace.cli.chaos import memory
from headrace.cli.chaos.evidence import pool_of
from headrace.cli.chaos.memory import Landings, flip_a_landed_byte
from headrace.protocol.control import Limits
from headrace.protocol.operator import InstanceFacts

BYTES, NUM_PAGES = 1 << 20, 16
DECODER = f"""
import mmap, os, sys
fd = os.memfd_create("headrace-kv")
os.ftruncate(fd, {BYTES})
pool = mmap.mmap(fd, {BYTES})
pool[:4096] = bytes([7]) * 4096
print("there", flush=True)
if sys.stdin.readline() == "land\\n":
    pool[8192:{BYTES} - 4096] = bytes([5]) * ({BYTES} - 12288)
else:
    for page in range(0, {BYTES}, 4096):  # a slot of each
        pool[page + 1024:page + 1088] = bytes([5]) * 64
print("done", flush=True)
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


def facts(decoder: subprocess.Popen[str]) -> InstanceFacts:
    limits = Limits(max_model_len=16 * NUM_PAGES, pool_tokens=16 * NUM_PAGES, page_size=16, max_running=8)
    return instance(2, "decoder", "decoder-0", pid=decoder.pid, limits=limits)


def land(decoder: subprocess.Popen[str], what: str = "land") -> None:
    assert decoder.stdin is not None and decoder.stdout is not None
    decoder.stdin.write(f"{what}\n")
    decoder.stdin.flush()
    decoder.stdout.readline()


def test_one_byte_of_what_lands_is_flipped(decoder: subprocess.Popen[str]) -> None:
    threading.Timer(0.1, land, [decoder]).start()
    assert flip_a_landed_byte(facts(decoder))
    pool = pool_of(decoder.pid)
    assert pool[:4096] == bytes([7]) * 4096
    landed = pool[8192 : BYTES - 4096]
    assert sum(byte != 5 for byte in landed) == 1 and landed[0] == 5 ^ memory.FLIP


def test_where_nothing_lands_nothing_is_flipped(
    decoder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "LANDS_WITHIN_S", 0.1)
    assert not flip_a_landed_byte(facts(decoder))
    assert pool_of(decoder.pid)[:] == bytes([7]) * 4096 + bytes(BYTES - 4096)


def test_what_lands_is_seen_once_there_is_enough_of_it(decoder: subprocess.Popen[str]) -> None:
    with Landings() as landings:
        assert not landings.has_landed(facts(decoder)) and not landings.has_landed(facts(decoder))
        land(decoder)
        until = time.monotonic() + 10.0
        while not landings.has_landed(facts(decoder)):
            assert time.monotonic() < until
        with Landings() as later:
            assert not later.has_landed(facts(decoder)) and not later.has_landed(facts(decoder))


def test_slots_of_pages_that_decode_are_no_landing(decoder: subprocess.Popen[str]) -> None:
    with Landings() as landings:
        assert not landings.has_landed(facts(decoder))
        land(decoder, "decode")
        assert not landings.has_landed(facts(decoder))
