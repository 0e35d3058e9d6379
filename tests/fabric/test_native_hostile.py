"""Peers of our own user that do not keep to the rules, over the control socket of a fabric: it lives, nobody else is
disturbed, nothing is left of them. (Strangers over TCP: test_native_strangers.py.)"""

import errno
import fcntl
import mmap
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import pytest
from native_side import NativeSide, closing, link

from headrace.fabric.interface import Descriptor, Imm, MessageReceived, PeerId, Reached, Revoked, Surplus
from headrace.fabric.native import NativeFabric

HEAD = struct.Struct("<IIQQ")
MAGIC = 0x48524331
KINDS = ("", "hello", "welcome", "open", "opened", "denied", "close", "closed", "bye", "beat")
F_ADD_SEALS = 1033
SHRINK, GROW, WRITE = 2, 4, 8

NUM_IMMS, NUM_BYTES = 8192, 256 << 10
IMMS_AT = 4096
BYTES_AT = IMMS_AT + 4 * NUM_IMMS
LANE = BYTES_AT + NUM_BYTES
IMM_TAIL, BYTE_TAIL, IMM_HEAD, BYTE_HEAD, WRITER_WAITS = 0, 8, 64, 72, 192
FRAGMENT = struct.Struct("<IIQQII")
FRAGMENT_MAGIC = 0x48524D31

SILENCE_S = 0.3
LOCAL = (socket.AF_UNIX, socket.SOCK_SEQPACKET)


def control_name(fabric: NativeFabric) -> bytes:
    at = 4 + 1 + fabric.address[4]  # behind the host's name
    return fabric.address[at + 1 : at + 1 + fabric.address[at]]


def memory_file(length: int = LANE, seals: int = SHRINK | GROW) -> int:
    fd = os.memfd_create("hostile", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, length)
    fcntl.fcntl(fd, F_ADD_SEALS, seals)
    return fd


class Peer:
    """One connection that says whatever it is told to."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.socket.settimeout(5.0)
        self.files: list[int] = []
        self.lane = mmap.mmap(-1, LANE)

    @classmethod
    def dial(cls, fabric: NativeFabric) -> "Peer":
        made = socket.socket(*LOCAL)
        made.connect(b"\0" + control_name(fabric))
        return cls(made)

    def keep(self, file: int) -> int:
        self.files.append(file)
        return file

    def say(
        self, kind: str | int, key: int = 0, *, files: Sequence[int] = (), magic: int = MAGIC, length: int = 0
    ) -> None:
        frame = HEAD.pack(magic, KINDS.index(kind) if isinstance(kind, str) else kind, key, length)
        socket.send_fds(self.socket, [frame], list(files))

    def hears(self) -> str:
        """The next frame but beats; "" where the connection is over."""
        while True:
            try:
                frame, files, _, _ = socket.recv_fds(self.socket, 100, 4)
            except ConnectionResetError:
                return ""
            self.files += files
            kind = KINDS[HEAD.unpack(frame)[1]] if frame else ""
            if kind != "beat":
                return kind

    def say_hello(self, bell: int | None = None) -> None:
        fd = memory_file()
        self.lane = mmap.mmap(fd, LANE)
        self.files += [fd, os.eventfd(0) if bell is None else bell]
        self.say("hello", files=self.files[-2:])
        assert self.hears() == "welcome"

    def tell_imms(self, imms: Sequence[int], tail: int | None = None) -> None:
        self.lane[IMMS_AT : IMMS_AT + 4 * len(imms)] = struct.pack(f"<{len(imms)}I", *imms)
        self.set(IMM_TAIL, len(imms) if tail is None else tail)

    def tell_fragment(self, fragment: bytes, *, length: int | None = None, tail: int | None = None) -> None:
        framed = struct.pack("<Q", len(fragment) if length is None else length) + fragment
        self.lane[BYTES_AT : BYTES_AT + len(framed)] = framed
        self.set(BYTE_TAIL, -(-len(framed) // 8) * 8 if tail is None else tail)

    def set(self, place: int, count: int) -> None:
        self.lane[place : place + 8] = struct.pack("<Q", count)

    def get(self, place: int) -> int:
        (count,) = struct.unpack_from("<Q", self.lane, place)
        return int(count)

    def leave(self) -> None:
        self.socket.close()
        self.lane.close()
        while self.files:
            os.close(self.files.pop())


@dataclass
class Scene:
    victim: NativeSide
    friend: NativeSide
    there: PeerId  # the victim, as the friend knows it
    here: PeerId

    def hostile(self) -> Peer:
        return Peer.dial(self.victim.fabric)

    def is_undisturbed(self) -> bool:
        """The friend's words and bytes arrive, and what the victim answers; then once more, for what comes late."""
        for _ in range(2):
            word, imm = secrets.token_bytes(20_000), secrets.randbits(32)
            self.victim.fabric.arm(Imm(imm), 1)
            self.friend.fabric.send(self.there, word)
            done = self.friend.done(self.friend.write(self.there, imm, 1 << 18), 5.0)
            assert done is not None and done.complete
            assert self.victim.hears_message(word)
            assert self.victim.waits(lambda imm=imm: any(event.imm == imm for event in self.victim.told(Reached)))  # type: ignore[misc]
            self.victim.fabric.send(self.here, word)
            assert self.friend.hears_message(word)
            self.victim.fabric.disarm(Imm(imm))
        return True

    def forgets(self, num_files: int) -> bool:
        return self.victim.waits(lambda: num_open_files() <= num_files, 5.0)


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    """One for all: whatever was said to the victim before, it is as well as ever."""
    victim, friend = (NativeSide(transports=("mapped",), silence_s=SILENCE_S) for _ in range(2))
    with closing(victim, friend):
        made = Scene(victim, friend, *link(friend, victim))
        assert made.is_undisturbed()
        yield made


@pytest.fixture
def hostile(scene: Scene) -> Iterator[Peer]:
    before = num_open_files()
    peer = scene.hostile()
    try:
        yield peer
        assert scene.is_undisturbed()
    finally:
        peer.leave()
    assert scene.forgets(before)


GARBAGE = {
    "nothing": b"",
    "a byte": b"x",
    "half a frame": HEAD.pack(MAGIC, 1, 0, 0)[:12],
    "a frame and a byte": HEAD.pack(MAGIC, 9, 0, 0) + b"x",
    "two frames at once": HEAD.pack(MAGIC, 9, 0, 0) * 2,
    "another magic": HEAD.pack(MAGIC ^ 1, 9, 0, 0),
    "kind 0": HEAD.pack(MAGIC, 0, 0, 0),
    "kind 10": HEAD.pack(MAGIC, 10, 0, 0),
    "the last kind": HEAD.pack(MAGIC, 0xFFFFFFFF, 0, 0),
    "64 KiB": bytes(65536),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
@pytest.mark.parametrize("greeted", [True, False], ids=["after hello", "at once"])
def test_garbage_ends_the_connection(hostile: Peer, garbage: bytes, greeted: bool) -> None:
    if greeted:
        hostile.say_hello()
    hostile.socket.send(garbage)
    assert hostile.hears() == ""


@pytest.mark.parametrize("kind", ["open", "closed", "bye", "beat", "welcome", "opened", "denied", "close"])
def test_nothing_may_precede_hello(hostile: Peer, kind: str) -> None:
    hostile.say(kind, files=[0] if kind in ("welcome", "opened") else [])
    assert hostile.hears() == ""


@pytest.mark.parametrize("kind", ["welcome", "opened", "denied", "close", "hello"])
def test_what_a_listener_says_is_not_taken_from_a_dialler_and_hello_is_said_once(hostile: Peer, kind: str) -> None:
    hostile.say_hello()
    hostile.say(kind, files={"welcome": [0], "opened": [0], "hello": hostile.files[:2]}.get(kind, []))
    assert hostile.hears() == ""


WRONG_NUMBERS = [("hello", n) for n in (0, 1, 3, 200)] + [
    (k, n) for k in ("open", "closed", "beat") for n in (1, 2, 200)
]


@pytest.mark.parametrize(("kind", "num_files"), WRONG_NUMBERS)
def test_a_wrong_number_of_files_ends_the_connection(hostile: Peer, kind: str, num_files: int) -> None:
    if kind != "hello":
        hostile.say_hello()
    hostile.say(kind, files=[0] * num_files)
    assert hostile.hears() == ""


def regular_file() -> int:
    return os.open(__file__, os.O_RDONLY)


def read_only_lane() -> int:
    fd = memory_file()
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    os.close(fd)
    return again


LANES: dict[str, Callable[[], int]] = {
    "too short": lambda: memory_file(LANE - 4096),
    "too long": lambda: memory_file(LANE + 4096),
    "empty": lambda: memory_file(0),
    "unsealed": lambda: memory_file(LANE, 0),
    "its end is not sealed": lambda: memory_file(LANE, GROW),
    "sealed against writes": lambda: memory_file(LANE, SHRINK | GROW | WRITE),
    "read-only": read_only_lane,
    "a file": regular_file,
    "an eventfd": lambda: os.eventfd(0),
    "a folder": lambda: os.open("/", os.O_PATH),
    "a device": lambda: os.open("/dev/null", os.O_RDWR),
}


@pytest.mark.parametrize("make", LANES.values(), ids=LANES)
def test_what_is_no_lane_is_refused(hostile: Peer, make: Callable[[], int]) -> None:
    hostile.files += [make(), os.eventfd(0)]
    hostile.say("hello", files=hostile.files)
    assert hostile.hears() == ""


def test_what_a_lane_tells_after_its_socket_has_ended_is_not_read(hostile: Peer) -> None:
    """Or it would be read as long as its owner pleases."""
    hostile.say_hello()
    fragment = struct.pack("<Q", 8) + bytes(8)
    hostile.lane[BYTES_AT:LANE] = fragment * (NUM_BYTES // len(fragment))  # as many as are read in a thousand turns
    hostile.set(BYTE_TAIL, NUM_BYTES)
    hostile.socket.shutdown(socket.SHUT_WR)
    assert hostile.hears() == ""
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        hostile.set(BYTE_TAIL, hostile.get(BYTE_HEAD) + NUM_BYTES)
    assert hostile.get(BYTE_HEAD) < 3 * NUM_BYTES


STORIES: dict[str, Callable[[Peer], None]] = {
    "more imms than there is room": lambda peer: peer.tell_imms([1], tail=NUM_IMMS + 1),
    "imms without end": lambda peer: peer.tell_imms([1], tail=2**64 - 1),
    "more bytes than there is room": lambda peer: peer.tell_fragment(b"x", tail=NUM_BYTES + 8),
    "bytes without end": lambda peer: peer.tell_fragment(b"x", tail=2**64 - 8),
    "less than a fragment": lambda peer: peer.tell_fragment(b"x", tail=4),
    "a fragment of nothing": lambda peer: peer.tell_fragment(b"", length=0),
    "a fragment longer than one": lambda peer: peer.tell_fragment(bytes(9000)),
    "a fragment longer than what came": lambda peer: peer.tell_fragment(bytes(8), length=17),
    "a fragment without end": lambda peer: peer.tell_fragment(bytes(8), length=2**64 - 1),
    "a length that wraps": lambda peer: peer.tell_fragment(bytes(8), length=2**64 - 8),
}


@pytest.mark.parametrize("tell", STORIES.values(), ids=STORIES)
def test_a_lane_that_makes_no_sense_ends_its_connection(hostile: Peer, tell: Callable[[Peer], None]) -> None:
    hostile.say_hello()
    tell(hostile)
    assert hostile.hears() == ""


def test_heads_that_the_writer_moved_are_the_readers_own_affair(scene: Scene, hostile: Peer) -> None:
    hostile.say_hello()
    for place in (IMM_HEAD, BYTE_HEAD):
        hostile.set(place, 2**64 - 1)
    word = b"a word of a peer that may speak"
    hostile.tell_fragment(FRAGMENT.pack(FRAGMENT_MAGIC, len(word), 77, 1, 0, 0) + word)
    assert scene.victim.hears_message(word)


def test_fragments_of_no_message_are_dropped(scene: Scene, hostile: Peer) -> None:
    dropped = scene.victim.fabric.num_fragments_dropped()
    hostile.say_hello()
    hostile.tell_fragment(secrets.token_bytes(500))
    assert scene.victim.waits(lambda: scene.victim.fabric.num_fragments_dropped() == dropped + 1)


def test_a_peer_without_a_key_may_send_messages_and_counts_nothing(scene: Scene, hostile: Peer) -> None:
    victim = scene.victim
    victim.fabric.arm(Imm(7), 1)
    before = victim.fabric.statistics()
    hostile.say_hello()
    hostile.say("open", secrets.randbits(64))
    assert hostile.hears() == "denied"
    hostile.tell_imms([7] * 100)
    word = b"no key"
    hostile.tell_fragment(FRAGMENT.pack(FRAGMENT_MAGIC, len(word), 78, 1, 0, 0) + word)
    assert victim.hears_message(word)
    assert victim.waits(lambda: hostile.get(IMM_HEAD) == 100)
    after = victim.fabric.statistics()
    assert (after.num_arrivals, after.num_surplus) == (before.num_arrivals, before.num_surplus)
    assert victim.told(Surplus) == [] and not any(event.imm == 7 for event in victim.told(Reached))
    victim.fabric.disarm(Imm(7))


def test_memory_that_can_shrink_is_not_written_and_the_failure_says_why() -> None:
    """Its owner would end us by SIGBUS."""
    with closing(former := NativeSide(transports=("mapped",))):
        address, name = former.fabric.address, control_name(former.fabric)
    descriptor = Descriptor(addressing="mapped", base=0, length=1 << 20, keys=(5,), generation=1)
    with closing(writer := NativeSide(transports=("mapped",))), socket.socket(*LOCAL) as listener:
        listener.bind(b"\0" + name)
        listener.listen()
        peer = writer.fabric.add_peer(address)
        writer.fabric.connect(peer, descriptor)
        transfer = writer.write(peer, 1, 4096)
        reader = Peer(listener.accept()[0])
        try:
            assert reader.hears() == "hello"
            reader.say("welcome", files=[reader.keep(os.eventfd(0))])
            assert reader.hears() == "open"
            reader.say("opened", 5, files=[reader.keep(memory_file(1 << 20, GROW))], length=1 << 20)
            assert reader.hears() == "closed"
            done = writer.done(transfer, 5.0)
        finally:
            reader.leave()
        assert done is not None and (done.num_posted, done.code) == (0, errno.EPERM)
        assert "must be sealed with F_SEAL_SHRINK" in done.text


def test_a_peer_that_closes_keys_it_never_opened_ends_nobody_elses_access(scene: Scene, hostile: Peer) -> None:
    hostile.say_hello()
    for _ in range(100):
        hostile.say("closed", secrets.randbits(64))
    for key in scene.victim.fabric.grant(scene.here).keys:  # not connected yet: nobody holds it
        hostile.say("closed", key)
    hostile.say("bye")
    hostile.say("open", 5)
    assert hostile.hears() == "denied", "and it is served all the same"
    scene.friend.fabric.connect(scene.there, scene.victim.fabric.grant(scene.here))


def asks_until_it_is_left(peer: Peer, key: int) -> bool:
    """It takes no answer, and no answer that waits may hold an open file of ours."""
    before = num_open_files()
    with suppress(ConnectionResetError, BrokenPipeError):
        for _ in range(10_000):
            peer.say("open", key)
            assert num_open_files() < before + 100
        return False
    return True


def test_who_asks_without_end_is_left(hostile: Peer) -> None:
    hostile.say_hello()
    assert asks_until_it_is_left(hostile, 5)


def test_who_asks_without_end_and_has_a_key_is_left_and_its_access_lasts_as_long_as_its_process(scene: Scene) -> None:
    descriptor = scene.victim.fabric.grant(scene.here)
    scene.friend.fabric.connect(scene.there, descriptor)
    peer = scene.hostile()
    peer.say_hello()
    assert asks_until_it_is_left(peer, descriptor.keys[0])
    peer.leave()
    assert scene.victim.fabric.revoke(scene.here) is False
    scene.friend.fabric.connect(scene.there, scene.victim.fabric.grant(scene.here))
    assert scene.is_undisturbed()
    assert scene.victim.told(Revoked) == []


def full_pipe() -> int:
    ends = os.pipe()
    both = os.open(f"/proc/self/fd/{ends[0]}", os.O_RDWR | os.O_NONBLOCK)  # neither end is ever closed
    for end in ends:
        os.close(end)
    with suppress(BlockingIOError):
        while os.write(both, bytes(65536)):
            pass
    os.set_blocking(both, True)
    return both


BELLS: dict[str, Callable[[], int]] = {
    "a full pipe": full_pipe,
    "a file to read": regular_file,
    "nothing at all": lambda: os.open("/", os.O_PATH),
    "its own lane": memory_file,
}


@pytest.mark.parametrize("make", BELLS.values(), ids=BELLS)
def test_a_bell_that_cannot_be_rung_holds_nobody_up(scene: Scene, hostile: Peer, make: Callable[[], int]) -> None:
    hostile.say_hello(make())
    hostile.lane[WRITER_WAITS] = 1
    hostile.tell_imms([1])
    assert scene.is_undisturbed()
    assert hostile.lane[WRITER_WAITS] == 0, "it was rung"


def test_whoever_says_nothing_is_left_after_a_while(scene: Scene) -> None:
    before = num_open_files()
    silent = [scene.hostile() for _ in range(50)]
    assert scene.is_undisturbed()
    begun = time.monotonic()
    assert [peer.hears() for peer in silent] == [""] * 50
    assert time.monotonic() - begun < 4 * SILENCE_S + 1.0
    for peer in silent:
        peer.leave()
    assert scene.forgets(before)


def test_a_thousand_that_come_and_go_leave_nothing(scene: Scene) -> None:
    before = num_open_files()
    for i in range(1000):
        peer = scene.hostile()
        if i % 2:
            peer.say_hello()
        peer.leave()
    assert scene.is_undisturbed()
    assert scene.forgets(before)
    assert scene.victim.told(MessageReceived)[-1:] != []
