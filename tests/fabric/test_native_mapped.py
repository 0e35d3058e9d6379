"""Memory that processes of one host have mapped: who may still write when, and what becomes of writers and readers that
are stopped, killed or gone. (What every transport does alike: test_native_processes.py, and the suite on `world`.)"""

import errno
import itertools
import os
import resource
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

import numpy as np
import pytest
import xxhash
from fixed_port import fixed_port
from native_reader import LENGTH, ReaderProcess
from native_side import POISON, NativeSide, closing, link, pages
from numpy.typing import NDArray

from headrace.fabric.interface import Descriptor, Imm, MessageReceived, PeerId, PeerLost, Reached, Revoked, SendFailed

WRITTEN = 0xAA
PAGE = 64 << 10
QUIET_S = 0.25
IMMS = itertools.count(100)  # of the reader that lasts


@pytest.fixture
def side() -> Iterator[NativeSide]:
    made = NativeSide(LENGTH, transports=("mapped",))
    with closing(made):
        yield made


@pytest.fixture(scope="module")
def process() -> Iterator[ReaderProcess]:
    """Of all tests that leave it alive: its start takes longer than they do."""
    with ReaderProcess("mapped") as made:
        yield made


@pytest.fixture
def mortal() -> Iterator[ReaderProcess]:
    with ReaderProcess("mapped") as made:
        yield made


def admitted_writer(side: NativeSide, process: ReaderProcess) -> PeerId:
    """It has our memory mapped, and has written all of it once."""
    peer = side.knows(process)
    side.admit(process, peer)
    process.ask("fill", WRITTEN)
    side.fabric.arm(Imm(1), 1)
    process.ask("write_once", side.fabric.address.hex(), 1, LENGTH)
    assert side.waits(lambda: bool(side.told(Reached)))
    assert (side.memory == WRITTEN).all()
    side.memory[:] = POISON
    return peer


def entered_reader(side: NativeSide, process: ReaderProcess) -> PeerId:
    """We have its memory mapped, and have written to it."""
    peer = side.knows(process)
    side.enter(process, peer)
    imm = next(IMMS)
    process.ask("arm", imm, 1)
    side.write(peer, imm, 1)
    process.ask("reached", imm)
    return peer


@contextmanager
def stopped(process: ReaderProcess) -> Iterator[None]:
    process.stop()
    try:
        yield
    finally:
        process.go_on()


@contextmanager
def stopped_in_the_middle_of_a_write(side: NativeSide, process: ReaderProcess) -> Iterator[None]:
    for _ in range(50):
        process.ask("write_once", side.fabric.address.hex(), 2, LENGTH)
        while side.memory[0] != WRITTEN:
            pass
        with stopped(process):
            if side.memory[-1] == POISON:
                yield
                return
        side.waits(lambda: side.memory[-1] == WRITTEN)
        side.memory[:] = POISON
    pytest.fail("every write was over before its writer was stopped")


@contextmanager
def no_file_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    with ExitStack() as opened:
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        with suppress(OSError):
            while True:
                opened.callback(os.close, os.dup(0))
        yield


def no_byte_lands(side: NativeSide) -> bool:
    side.memory[:] = POISON
    time.sleep(QUIET_S)
    return bool((side.memory == POISON).all())


# ---- the end of an access ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stop",
    [lambda _, process: stopped(process), stopped_in_the_middle_of_a_write],
    ids=["idle", "in the middle of a write"],
)
def test_the_access_of_a_stopped_writer_ends_when_it_goes_on_and_not_before(
    side: NativeSide, process: ReaderProcess, stop: Callable[[NativeSide, ReaderProcess], object]
) -> None:
    peer = admitted_writer(side, process)
    with stop(side, process):  # type: ignore[attr-defined]
        assert side.fabric.revoke(peer) is False
        assert not side.hears(Revoked(peer=peer), QUIET_S)
    assert side.hears(Revoked(peer=peer), 5.0)
    assert no_byte_lands(side)
    transfer = process.ask("write_once", side.fabric.address.hex(), 3, LENGTH)
    assert process.ask("done", transfer) == "0 0", "nothing of it was posted"
    assert (side.memory == POISON).all()
    assert side.told(Revoked) == [Revoked(peer=peer)]
    side.admit(process, peer)
    side.fabric.arm(Imm(4), 1)
    process.ask("write_once", side.fabric.address.hex(), 4, PAGE)
    assert side.waits(lambda: any(event.imm == 4 for event in side.told(Reached)))


def test_the_access_of_a_writer_that_is_killed_while_it_is_stopped_ends(
    side: NativeSide, mortal: ReaderProcess
) -> None:
    peer = admitted_writer(side, mortal)
    with stopped_in_the_middle_of_a_write(side, mortal):
        side.fabric.revoke(peer)
        mortal.process.kill()
        assert side.hears(Revoked(peer=peer), 5.0)
    assert no_byte_lands(side)


def test_the_access_of_a_killed_writer_ends_though_a_child_of_it_holds_its_sockets(
    side: NativeSide, mortal: ReaderProcess
) -> None:
    peer = admitted_writer(side, mortal)
    child = int(mortal.ask("fork"))
    try:
        mortal.process.kill()
        assert side.waits(lambda: bool(side.told(PeerLost)), 5.0)
        side.fabric.revoke(peer)
        assert side.hears(Revoked(peer=peer), 5.0)
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)


def test_the_access_of_a_writer_that_closes_its_fabric_and_lives_ends(side: NativeSide, mortal: ReaderProcess) -> None:
    peer = admitted_writer(side, mortal)
    mortal.ask("close")
    side.fabric.revoke(peer)
    assert side.hears(Revoked(peer=peer), 5.0)
    assert mortal.process.poll() is None


def test_a_descriptor_connected_twice_is_mapped_once_and_revoked_for_good(side: NativeSide) -> None:
    """A Hello that is repeated. The answer to a second request, confirmed as closed, would end the access by name while
    the memory stays mapped."""
    for _ in range(20):
        writer = NativeSide(transports=("mapped",))
        with closing(writer):
            there, here = writer.fabric.add_peer(side.fabric.address), side.fabric.add_peer(writer.fabric.address)
            descriptor = side.fabric.grant(here)
            for _ in range(3):
                writer.fabric.connect(there, descriptor)
            assert writer.done(writer.write(there, 5, PAGE)) is not None
            side.fabric.revoke(here)
            assert side.hears(Revoked(peer=here))
            side.memory[:] = 0
            done = writer.done(writer.write(there, 6, PAGE))
            assert done is not None and (done.num_posted, done.code != 0) == (0, True)
            assert (side.memory == 0).all()


def test_a_writer_is_let_in_though_the_reader_has_no_file_left_to_open(
    side: NativeSide, process: ReaderProcess
) -> None:
    """To be denied is final: the writer would never ask again."""
    peer = admitted_writer(side, process)
    with no_file_left():
        side.admit(process, peer)
        side.fabric.arm(Imm(2), 1)
        process.ask("write_once", side.fabric.address.hex(), 2, LENGTH)
        assert side.waits(lambda: any(event.imm == 2 for event in side.told(Reached)), 5.0)


def test_a_revoke_of_one_writer_does_not_wait_for_another_that_hangs(
    side: NativeSide, process: ReaderProcess, mortal: ReaderProcess
) -> None:
    admitted_writer(side, process)
    kept = side.knows(mortal)
    side.admit(mortal, kept)
    with stopped_in_the_middle_of_a_write(side, process):
        side.fabric.arm(Imm(7), 500)
        mortal.ask("write", side.fabric.address.hex(), 7, 500, PAGE)
        assert side.waits(lambda: any(event.imm == 7 for event in side.told(Reached)), 5.0)
        side.fabric.revoke(kept)
        assert side.hears(Revoked(peer=kept), 5.0)


# ---- readers -------------------------------------------------------------------------------------------------------


def test_a_killed_reader_fails_what_was_on_its_way_once_and_nothing_else(
    side: NativeSide, process: ReaderProcess, mortal: ReaderProcess
) -> None:
    peer, kept = entered_reader(side, mortal), entered_reader(side, process)
    with stopped(mortal):  # so that all of them are under way
        lost = [side.write_pages(peer, 5, 5_000, 64) for _ in range(4)]
        for _ in range(5):
            side.fabric.send(peer, bytes(1 << 20))
        going_on = side.write_pages(kept, 6, 500, PAGE)
        assert side.waits(lambda: side.fabric.statistics().num_writes_posted >= 8_000)
        mortal.process.kill()
    assert side.waits(lambda: bool(side.told(PeerLost)), 2.0)
    (told,) = side.told(PeerLost)
    assert (told.peer, told.code, bool(told.text)) == (peer, errno.ECONNRESET, True)
    for transfer in lost[1:]:  # the first may have gone whole
        done = side.done(transfer)
        assert done is not None and not done.complete and done.code == told.code and told.text in done.text
    done = side.done(going_on)
    assert done is not None and (done.num_posted, done.complete, done.code) == (500, True, 0)
    late = side.done(side.write(peer, 8, 1))
    assert late is not None and (late.num_posted, late.code) == (0, told.code)
    imm = next(IMMS)
    process.ask("arm", imm, 1)
    side.write(kept, imm, PAGE)
    process.ask("reached", imm)
    assert len(side.told(PeerLost)) == 1
    assert [(event.peer, event.code) for event in side.told(SendFailed)] == [(peer, told.code)]


def test_a_reader_started_anew_at_the_same_address_refuses_the_old_key_and_takes_the_new_one(side: NativeSide) -> None:
    port = fixed_port()
    with ReaderProcess("mapped", port) as old:
        peer = side.knows(old)
        address = old.ask("address")
        for _ in range(3):
            side.enter(old, peer)
        descriptor = Descriptor.decode(bytes.fromhex(old.ask("grant", side.fabric.address.hex())))
        old.process.kill()
        assert side.waits(lambda: bool(side.told(PeerLost)))
    with ReaderProcess("mapped", port) as new:
        assert new.ask("address") == address
        side.fabric.connect(peer, replace(descriptor, generation=1))
        done = side.done(side.write(peer, 5, PAGE))
        assert done is not None and done.num_posted == 0 and "Key was rejected" in done.text
        side.enter(new, peer)
        new.ask("arm", 6, 1)
        side.write(peer, 6, PAGE)
        new.ask("reached", 6)
        assert new.ask("arrivals") == "1"


def test_a_stopped_reader_parks_more_arrivals_than_a_lane_holds_and_loses_none(
    side: NativeSide, process: ReaderProcess
) -> None:
    peer = entered_reader(side, process)
    before = int(process.ask("arrivals"))
    imm, after = next(IMMS), next(IMMS)
    process.ask("arm", imm, 20_000)
    process.ask("arm", after, 1)
    with stopped(process):
        transfer = side.write_pages(peer, imm, 20_000, 0)
        assert side.done(transfer, QUIET_S) is None
        assert side.fabric.statistics().num_writes_posted == 1 + 8192
    process.ask("reached", imm)
    side.write(peer, after, 0)
    process.ask("reached", after)
    assert int(process.ask("arrivals")) == before + 20_001


def test_another_write_to_the_place_of_a_parked_one_is_written_whole_and_nothing_beyond(
    side: NativeSide, process: ReaderProcess
) -> None:
    """The long one is copied and waits for room in the lane; the short one, of a step, comes before it is offered
    again. Taken for one write, the copy would go on behind the end of both."""
    peer = entered_reader(side, process)
    side.memory[:] = WRITTEN
    process.ask("poison")
    with stopped(process):
        side.write_pages(peer, 5, 8192, 0)
        transfer = side.fabric.open_transfer(peer, Imm(6))
        side.fabric.submit_program(1, [(transfer, pages(1, 4096))])
        side.fabric.submit_write(transfer, src_offset=0, dst_offset=0, length=1 << 20)
        side.fabric.submit_last(transfer)
        assert side.waits(lambda: side.fabric.statistics().num_writes_posted == 1 + 8192)
        side.fabric.raise_layers(1024 + 1)
        time.sleep(QUIET_S)
    done = side.done(transfer)
    assert done is not None and (done.num_posted, done.complete) == (2, True)
    with closing(expected := NativeSide(LENGTH, transports=("mapped",))):
        expected.memory[: 1 << 20] = WRITTEN
        assert process.ask("hash", 0, LENGTH) == hash_of(expected.memory)


def hash_of(memory: NDArray[np.uint8]) -> str:
    return xxhash.xxh3_64_hexdigest(memory.tobytes())


# ---- messages ------------------------------------------------------------------------------------------------------


def test_long_messages_both_ways_at_once_arrive_whole_and_in_order() -> None:
    """Each is 64 times what a lane holds: room in it must be told, not waited for (that took 3 s a message)."""
    one, other = (NativeSide(transports=("mapped",)) for _ in range(2))
    with closing(one, other):
        there, here = link(one, other)
        block = secrets.token_bytes(16 << 20)
        messages = [block, b"short", block[:-1], block[: 1 << 20], b"s", block[7:]]
        begun = time.monotonic()
        for message in messages:
            one.fabric.send(there, message)
            other.fabric.send(here, message)
        for each in (one, other):
            assert each.waits(lambda each=each: len(each.told(MessageReceived)) == len(messages))  # type: ignore[misc]
            assert [event.message for event in each.told(MessageReceived)] == messages
        assert time.monotonic() - begun < 5.0


def test_writes_do_not_wait_for_messages_that_wait_for_room(side: NativeSide, process: ReaderProcess) -> None:
    peer = entered_reader(side, process)
    imm = next(IMMS)
    process.ask("arm", imm, 400)
    with stopped(process):
        for _ in range(3):
            side.fabric.send(peer, bytes(16 << 20))
        done = side.done(side.write_pages(peer, imm, 400, PAGE), 5.0)
        assert done is not None and done.complete
    process.ask("reached", imm)
    for _ in range(3):
        process.ask("message")


# ---- other users ---------------------------------------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_a_connection_of_another_user_is_refused(side: NativeSide) -> None:
    at = 4 + 1 + side.fabric.address[4]  # behind the host's name
    name = side.fabric.address[at + 1 : at + 1 + side.fabric.address[at]]
    told, answer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.settimeout(5.0)
            stranger.connect(b"\0" + name)
            os.write(answer, b"closed" if stranger.recv(100) == b"" else b"answered")
        os._exit(0)
    os.close(answer)
    assert os.read(told, 100) == b"closed"
    os.waitpid(child, 0)
    os.close(told)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_memory_is_not_asked_of_another_user(side: NativeSide) -> None:
    """Who listens by the name of a peer that ended."""
    with closing(former := NativeSide(transports=("mapped",))):
        address = former.fabric.address
    at = 4 + 1 + address[4]
    name = address[at + 1 : at + 1 + address[at]]
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.bind(b"\0" + name)
            stranger.listen()
            os.write(told, b"!")
            time.sleep(60.0)
        os._exit(0)
    try:
        assert os.read(ready, 1) == b"!"
        peer = side.fabric.add_peer(address)
        assert side.waits(lambda: bool(side.told(PeerLost)))
        assert [(event.peer, event.code) for event in side.told(PeerLost)] == [(peer, errno.EPERM)]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(told)
