"""Conformance: messages arrive whole, once and in order, beside the writes."""

import numpy as np
import pytest
from fabric_world import Link, World, link, page_writes

from headrace.errors import InputError
from headrace.fabric.interface import MessageReceived


def test_messages_of_all_sizes_arrive_whole_and_in_order(pair: Link) -> None:
    rng = np.random.default_rng(3)
    sizes = [1, 65536, 3 << 20, 2, 8191, 8192, 8193, 1 << 20, 5]
    messages = [rng.bytes(size) for size in sizes]
    for message in messages:
        pair.writer.fabric.send(pair.to_reader, message)
    pair.world.wait_for(lambda: len(pair.reader.messages()) == len(messages))
    assert pair.reader.messages() == messages
    assert pair.writer.fabric.statistics().num_messages_sent == len(messages)
    assert pair.reader.fabric.statistics().num_messages_received == len(messages)


def test_messages_travel_both_ways_between_writes(pair: Link) -> None:
    pair.arm(4, 64)
    transfer = pair.open(4)
    pair.writer.fabric.submit_pages(transfer, page_writes(list(range(64)), list(range(64))))
    for i in range(100):
        pair.writer.fabric.send(pair.to_reader, b"there %d" % i)
        pair.reader.fabric.send(pair.to_writer, b"back %d" % i)
    pair.writer.fabric.submit_last(transfer)
    pair.world.wait_for(lambda: len(pair.reader.messages()) == 100 and len(pair.writer.messages()) == 100)
    assert pair.reader.messages() == [b"there %d" % i for i in range(100)]
    assert pair.writer.messages() == [b"back %d" % i for i in range(100)]
    pair.wait_reached(4, 64)


def test_messages_of_several_senders_do_not_mix(world: World) -> None:
    reader = world.side()
    links = [link(world, reader=reader) for _ in range(3)]
    messages = [bytes([65 + i]) * 200_000 for i in range(3)]
    for each, message in zip(links, messages, strict=True):
        for _ in range(3):
            each.writer.fabric.send(each.to_reader, message)
    world.wait_for(lambda: len(reader.messages()) == 9)
    assert sorted(reader.messages()) == sorted(messages * 3)


def test_the_sender_may_reuse_its_buffer(pair: Link) -> None:
    message = bytearray(b"first")
    pair.writer.fabric.send(pair.to_reader, bytes(message))
    message[:] = b"xxxxx"
    pair.world.wait_for(lambda: pair.reader.told(MessageReceived) != [])
    assert pair.reader.messages() == [b"first"]


@pytest.mark.parametrize("size", [0, (16 << 20) + 1])
def test_messages_of_a_wrong_size_are_refused(pair: Link, size: int) -> None:
    with pytest.raises(InputError, match="message"):
        pair.writer.fabric.send(pair.to_reader, bytes(size))
