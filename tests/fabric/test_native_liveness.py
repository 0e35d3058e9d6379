"""Who is there: peers that are killed, stopped, busy or started anew, deadlines, and strangers at the watching port."""

import ctypes
import errno
import os
import signal
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest
from fixed_port import fixed_port
from native_reader import LENGTH, ReaderProcess
from native_side import NativeSide, closing, link

from headrace.fabric.interface import Imm, PeerHeard, PeerId, PeerLost, PeerSilent, Reached
from headrace.fabric.native import Transport

SILENCE_S = 0.4
FRAME = struct.Struct("<IIQQ")
MAGIC = 0x48524331
HELLO, WELCOME, BEAT = 1, 2, 9


@pytest.fixture(params=["tcp", "mapped", "shm"])
def transport(request: pytest.FixtureRequest) -> Transport:
    chosen: Transport = request.param
    return chosen


@pytest.fixture
def side(transport: Transport) -> Iterator[NativeSide]:
    made = NativeSide(LENGTH, transports=(transport,), silence_s=SILENCE_S)
    with closing(made):
        yield made


@contextmanager
def watched(side: NativeSide, transport: Transport, port: int = 0) -> Iterator[tuple[ReaderProcess, PeerId]]:
    """A peer that we write to, and that is known to be there."""
    with ReaderProcess(transport, port, silence_s=SILENCE_S) as process:
        peer = side.knows(process)
        side.enter(process, peer)
        process.ask("arm", 1, 1)
        side.write(peer, 1, 1)
        process.ask("reached", 1)
        yield process, peer


def news(side: NativeSide) -> list[PeerLost | PeerSilent | PeerHeard]:
    side.events += side.fabric.drain_events()
    return [event for event in side.events if isinstance(event, PeerLost | PeerSilent | PeerHeard)]


def test_a_killed_peer_is_told_lost_once_within_a_second(side: NativeSide, transport: Transport) -> None:
    with watched(side, transport) as (process, peer):
        process.process.kill()
        assert side.waits(lambda: bool(news(side)), 1.0)
        (lost,) = side.told(PeerLost)
        assert lost.peer == peer and lost.code > 0 and lost.text
        side.waits(lambda: False, 1.2)  # it is dialled again, in vain
        assert news(side) == [lost]


def test_a_peer_that_came_back_at_its_address_and_died_again_is_told_lost_again_though_nothing_is_sent_there(
    side: NativeSide, transport: Transport
) -> None:
    port = fixed_port()
    with watched(side, transport, port) as (old, peer):
        address = old.ask("address")
        old.process.kill()
        assert side.waits(lambda: len(side.told(PeerLost)) == 1)
    with ReaderProcess(transport, port, silence_s=SILENCE_S) as new:
        assert new.ask("address") == address
        time.sleep(1.2)  # it is dialled every second
        side.events += side.fabric.drain_events()
        assert side.told(PeerHeard) == [PeerHeard(peer=peer)] * (transport == "tcp")
        new.process.kill()
        assert side.waits(lambda: len(side.told(PeerLost)) == 2, 2.5)
        assert [event.peer for event in side.told(PeerLost)] == [peer, peer]


def test_a_stopped_peer_is_told_silent_and_heard_again_once_each(side: NativeSide, transport: Transport) -> None:
    with watched(side, transport) as (process, peer):
        stopped_at = time.monotonic()
        process.process.send_signal(signal.SIGSTOP)
        assert side.waits(lambda: bool(news(side)), 2.0)
        assert time.monotonic() - stopped_at > SILENCE_S / 2
        side.waits(lambda: False, 2 * SILENCE_S)
        assert news(side) == [PeerSilent(peer=peer)]
        process.process.send_signal(signal.SIGCONT)
        assert side.hears(PeerHeard(peer=peer), 2.0)
        process.ask("arm", 2, 1)
        side.write(peer, 2, 1)
        process.ask("reached", 2)
        assert news(side) == [PeerSilent(peer=peer), PeerHeard(peer=peer)]
        assert process.ask("num_events", "PeerSilent") == "0", "it was stopped, not we"


def test_nothing_is_told_of_a_peer_whose_python_is_busy_nor_by_one(side: NativeSide, transport: Transport) -> None:
    with watched(side, transport) as (process, _):
        process.ask("grant", side.fabric.address.hex())
        assert process.process.stdin is not None and process.process.stdout is not None
        process.process.stdin.write(f"hold_the_gil {3 * SILENCE_S}\n")
        process.process.stdin.flush()
        ctypes.PyDLL(None).usleep(int(3 * SILENCE_S * 1e6))  # ours is held as well
        assert process.process.stdout.readline() == "back\n"
        side.waits(lambda: False, SILENCE_S)
        assert news(side) == []
        for kind in ("PeerSilent", "PeerHeard", "PeerLost"):
            assert process.ask("num_events", kind) == "0"


def test_a_deadline_ends_a_list_once_whatever_holds_it_up(side: NativeSide, transport: Transport) -> None:
    with watched(side, transport) as (process, peer):
        waiting = side.fabric.open_transfer(peer, Imm(2), deadline_s=0.2)  # nothing is ever submitted
        done = side.done(waiting, 2.0)
        assert done is not None and (done.num_posted, done.complete, done.code) == (0, False, errno.ETIMEDOUT)
        process.process.send_signal(signal.SIGSTOP)
        begun = time.monotonic()
        parked = side.write_pages(peer, 3, 20_000, 1024, deadline_s=0.3)
        late = side.write_pages(peer, 4, 10, 1024, deadline_s=0.3)
        if transport == "tcp":  # what was posted is still under way: its end is told when it is known
            time.sleep(0.5)
            num_posted = side.fabric.close_transfer(parked)
            process.process.send_signal(signal.SIGCONT)
        done = side.done(parked, 5.0)
        assert done is not None and (done.complete, done.code) == (False, errno.ETIMEDOUT)
        assert time.monotonic() - begun > 0.3
        assert 0 < done.num_posted < 20_000
        if transport == "tcp":
            assert done.num_posted == num_posted
        time.sleep(0.05)  # the other list's deadline is a little later
        process.process.send_signal(signal.SIGCONT)
        done = side.done(late, 5.0)
        assert done is not None and (done.num_posted, done.complete, done.code) == (0, False, errno.ETIMEDOUT)
        process.ask("arm", 5, 1)
        kept = side.write(peer, 5, 1, deadline_s=60.0)
        process.ask("reached", 5)
        done = side.done(kept)
        assert done is not None and done.complete and done.code == 0


# ---- the port at which TCP peers are watched -----------------------------------------------------------------------


@pytest.fixture
def pair() -> Iterator[tuple[NativeSide, NativeSide, PeerId]]:
    one, other = (NativeSide(transports=("tcp",), silence_s=SILENCE_S) for _ in range(2))
    with closing(one, other):
        there, _ = link(other, one)
        yield one, other, there


def watch_port(side: NativeSide) -> int:
    at = 4
    for _ in range(2):  # behind the host and the control socket's name
        at += 1 + side.fabric.address[at]
    return int(side.fabric.address[at + 1 : at + 1 + side.fabric.address[at]].rpartition(b":")[2])


def dialled(side: NativeSide) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", watch_port(side)))
    made.settimeout(5.0)
    return made


def is_over(stranger: socket.socket) -> bool:
    try:
        while stranger.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


def is_left(stranger: socket.socket) -> bool:
    """Or it hears the next beat."""
    try:
        return stranger.recv(1) == b""
    except ConnectionResetError:
        return True


def is_undisturbed(one: NativeSide, other: NativeSide, there: PeerId) -> bool:
    imm = len(one.events) + 1
    one.fabric.arm(Imm(imm), 1)
    other.write(there, imm, 1000)
    return one.waits(lambda: any(event.imm == imm for event in one.told(Reached))) and not news(one) and not news(other)


def test_strangers_who_never_say_hello_are_left_after_a_while(pair: tuple[NativeSide, NativeSide, PeerId]) -> None:
    one = pair[0]
    assert is_undisturbed(*pair)
    before = len(os.listdir("/proc/self/fd"))
    with ExitStack() as held:
        strangers = [held.enter_context(dialled(one)) for _ in range(200)]
        for i, stranger in enumerate(strangers):
            stranger.send(FRAME.pack(MAGIC, HELLO, 0, 0)[: i % FRAME.size])
        assert is_undisturbed(*pair)
        begun = time.monotonic()
        assert all(is_over(stranger) for stranger in strangers)
        assert time.monotonic() - begun < 4 * SILENCE_S + 1.0
    assert one.waits(lambda: len(os.listdir("/proc/self/fd")) <= before, 2.0)
    assert is_undisturbed(*pair)


def test_who_says_hello_and_then_nothing_for_ten_silences_is_left_and_who_beats_is_not() -> None:
    with closing(side := NativeSide(transports=("tcp",), silence_s=0.2)), dialled(side) as mute, dialled(side) as slow:
        for stranger in (mute, slow):
            stranger.send(FRAME.pack(MAGIC, HELLO, 0, 0))
        begun = time.monotonic()
        while time.monotonic() < begun + 2.5:
            slow.send(FRAME.pack(MAGIC, BEAT, 0, 0))
            time.sleep(0.5)  # as the slowest peer does, whatever it takes for a silence
        for stranger in (mute, slow):  # what came so far
            assert stranger.recv(65536)[4:8] == struct.pack("<I", WELCOME)
        assert (is_left(mute), is_left(slow)) == (True, False)


def test_a_peer_that_was_stopped_for_so_long_that_it_was_left_comes_back() -> None:
    side = NativeSide(LENGTH, transports=("tcp",), silence_s=0.2)
    with closing(side), watched(side, "tcp") as (process, peer):
        process.ask("grant", side.fabric.address.hex())
        process.process.send_signal(signal.SIGSTOP)
        assert side.hears(PeerSilent(peer=peer))
        time.sleep(2.3)
        process.process.send_signal(signal.SIGCONT)
        assert side.hears(PeerHeard(peer=peer))
        time.sleep(1.5)  # it dials again after a second
        assert (process.ask("num_events", "PeerLost"), process.ask("num_events", "PeerSilent")) == ("1", "0")
        assert side.told(PeerLost) == []
        side.fabric.close()
        time.sleep(0.3)
        assert process.ask("num_events", "PeerLost") == "2", "which says that it was back"


def test_a_host_that_takes_all_the_places_it_may_have_takes_none_from_those_who_are_there(
    pair: tuple[NativeSide, NativeSide, PeerId],
) -> None:
    assert is_undisturbed(*pair)
    with ExitStack() as held:
        strangers = [held.enter_context(dialled(pair[0])) for _ in range(300)]
        for stranger in strangers:
            with suppress(OSError):
                stranger.send(FRAME.pack(MAGIC, HELLO, 0, 0))
        assert strangers[0].recv(FRAME.size)[4:8] == struct.pack("<I", WELCOME)
        assert (is_left(strangers[0]), is_left(strangers[-1])) == (False, True)
        assert is_undisturbed(*pair)
    pair[0].waits(lambda: False, 0.2)
    with dialled(pair[0]) as another:
        another.send(FRAME.pack(MAGIC, HELLO, 0, 0))
        assert another.recv(FRAME.size)[4:8] == struct.pack("<I", WELCOME)


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n",
        FRAME.pack(MAGIC ^ 1, HELLO, 0, 0),
        FRAME.pack(MAGIC, BEAT, 0, 0),
        FRAME.pack(MAGIC, HELLO, 0, 0) * 2,
        FRAME.pack(MAGIC, HELLO, 0, 0) + FRAME.pack(MAGIC, 3, 0, 0),
        FRAME.pack(MAGIC, 4, 0, 0),
        bytes(4096),
    ],
    ids=["HTTP", "another magic", "beats only", "hello twice", "it asks for memory", "it hands some over", "zeros"],
)
def test_strangers_who_talk_nonsense_are_left_at_once(
    pair: tuple[NativeSide, NativeSide, PeerId], words: bytes
) -> None:
    with dialled(pair[0]) as stranger:
        stranger.send(words)
        begun = time.monotonic()
        assert is_over(stranger)
        assert time.monotonic() - begun < SILENCE_S
    assert is_undisturbed(*pair)


def test_a_watching_port_that_beats_and_says_no_welcome_is_silent_and_then_lost() -> None:
    """Somebody else listens where a peer did."""
    with closing(former := NativeSide(transports=("tcp",))):
        address, port = former.fabric.address, watch_port(former)
    with closing(side := NativeSide(transports=("tcp",), silence_s=SILENCE_S)), socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen()
        peer = side.fabric.add_peer(address)
        with listener.accept()[0] as connection:
            assert side.hears(PeerSilent(peer=peer), 4 * SILENCE_S)
            connection.send(bytes(100))
            assert side.waits(lambda: bool(side.told(PeerLost)), 2.0)
