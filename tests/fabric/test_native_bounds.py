"""What must not grow: the address space behind revoked peers, the messages towards a peer that takes none."""

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.fabric.interface import Imm, MessageReceived, PeerId, Reached, SendFailed
from headrace.fabric.native import NativeFabric

LENGTH = 32 << 20


@contextmanager
def opened(length: int = LENGTH) -> Iterator[NativeFabric]:
    fd = os.memfd_create("headrace-bounds", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, length)
    fabric = NativeFabric(fd, length)
    os.close(fd)
    yield fabric
    fabric.close()


def address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")


def write(writer: NativeFabric, to: PeerId, reader: NativeFabric, *, length: int, count: int) -> None:
    """`count` writes of `length` bytes; returns when the reader has counted them."""
    reader.arm(Imm(1), count)
    transfer = writer.open_transfer(to, Imm(1))
    for _ in range(count):
        writer.submit_write(transfer, src_offset=0, dst_offset=0, length=length)
    writer.submit_last(transfer)
    deadline = time.monotonic() + 20.0
    while not any(isinstance(event, Reached) for event in reader.drain_events()):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    reader.disarm(Imm(1))


def test_peers_that_come_and_go_leave_no_address_space_behind() -> None:
    with opened() as reader:
        begun = 0
        for i in range(50):
            if i == 10:
                begun = address_space()
            with opened(4096) as writer:
                from_writer, to_reader = reader.add_peer(writer.address), writer.add_peer(reader.address)
                writer.connect(to_reader, reader.grant(from_writer))
                write(writer, to_reader, reader, length=4096, count=1)
            reader.remove_peer(from_writer)
        assert address_space() - begun < 8 * LENGTH  # of 40


def test_a_peer_that_is_revoked_again_and_again_leaves_a_few_mappings_at_most() -> None:
    """Its connection stays: a mapping goes when more bytes have come than one write can hold."""
    length = 1 << 20
    with opened(length) as reader, opened(length) as writer:
        from_writer, to_reader = reader.add_peer(writer.address), writer.add_peer(reader.address)
        begun = 0
        for i in range(150):
            if i == 50:
                begun = address_space()
            writer.connect(to_reader, reader.grant(from_writer))
            write(writer, to_reader, reader, length=length, count=2)
            reader.revoke(from_writer)
        assert address_space() - begun < 20 * length  # of 100


def test_messages_to_a_peer_that_is_gone_wait_up_to_a_bound_and_then_fail() -> None:
    with opened(4096) as sender:
        with opened(4096) as gone:
            address = gone.address
        peer = sender.add_peer(address)
        for _ in range(6):
            sender.send(peer, bytes(16 << 20))
        failed = [event for event in sender.drain_events() if isinstance(event, SendFailed)]
        assert [event.code for event in failed].count(errno.ENOBUFS) >= 2
        assert {event.peer for event in failed} == {peer}


def test_what_was_sent_makes_room_for_more() -> None:
    with opened(4096) as sender, opened(4096) as receiver:
        peer = sender.add_peer(receiver.address)
        for i in range(12):
            sender.send(peer, bytes([i]) * (12 << 20))
            deadline = time.monotonic() + 20.0
            while not (told := receiver.drain_events()):
                assert time.monotonic() < deadline
                time.sleep(0.001)
            assert told == [MessageReceived(message=bytes([i]) * (12 << 20))]
        assert sender.drain_events() == []
