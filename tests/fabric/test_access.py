"""Conformance: who may write here: grants, revocation, new descriptors."""

import numpy as np
import pytest
from fabric_world import Link, World, fill, link, page_writes, poisoned, write_one

from headrace.errors import InputError
from headrace.fabric.interface import LAYERS_PER_STEP, Descriptor, Imm, Surplus


def test_a_write_after_a_revoke_lands_nowhere(pair: Link) -> None:
    pair.arm(5, 1)
    write_one(pair, imm=5)
    pair.wait_reached(5, 1)
    pair.revoke()
    pair.reader.memory[:] = poisoned(pair.reader)
    done = write_one(pair, imm=6, dst=8192)
    assert done.num_posted <= 1  # whether it is refused, fails at the writer or vanishes is the transport's affair
    pair.world.settle()
    np.testing.assert_array_equal(pair.reader.memory, poisoned(pair.reader))


def test_revoke_in_full_flight_leaves_the_memory_as_it_is_then(pair: Link) -> None:
    transfer = pair.open(7)
    writes = page_writes(
        list(range(16)), list(range(16)), layers=(0, 16), length=65536 - 15 * 1024, src=(0, 1024, 1024)
    )
    pair.writer.fabric.submit_pages(transfer, writes)
    pair.world.wait_for(lambda: pair.reader.fabric.statistics().num_arrivals >= 3)
    pair.revoke()
    pair.reader.memory[:] = poisoned(pair.reader)
    pair.close(transfer)
    pair.wait_done(transfer)
    pair.world.settle()
    np.testing.assert_array_equal(pair.reader.memory, poisoned(pair.reader))


def test_revoke_may_be_repeated_and_precede_any_grant(world: World) -> None:
    writer, reader = world.side(), world.side()
    peer = reader.fabric.add_peer(writer.fabric.address)
    reader.fabric.revoke(peer)
    reader.fabric.grant(peer)
    reader.fabric.revoke(peer)
    reader.fabric.revoke(peer)


def test_a_new_grant_works_and_its_key_and_generation_are_new(pair: Link) -> None:
    pair.reader.fabric.revoke(pair.to_writer)
    fresh = pair.reader.fabric.grant(pair.to_writer)
    assert fresh.keys != pair.descriptor.keys
    assert fresh.generation != pair.descriptor.generation
    pair.writer.fabric.connect(pair.to_reader, fresh)
    pair.arm(5, 1)
    assert write_one(pair, imm=5).num_failed == 0
    pair.wait_reached(5, 1)
    np.testing.assert_array_equal(pair.reader.memory[:4096], pair.writer.memory[:4096])


def test_a_second_grant_revokes_the_first(pair: Link) -> None:
    fresh = pair.reader.fabric.grant(pair.to_writer)
    pair.world.settle()  # where the first is not over at once, it is soon
    write_one(pair, imm=5)  # still with the older key
    pair.world.settle()
    np.testing.assert_array_equal(pair.reader.memory, poisoned(pair.reader))
    pair.writer.fabric.connect(pair.to_reader, fresh)
    pair.arm(6, 1)
    write_one(pair, imm=6)
    pair.wait_reached(6, 1)


def test_revoking_one_peer_does_not_disturb_another(world: World) -> None:
    reader = world.side()
    revoked, kept = link(world, reader=reader), link(world, reader=reader)
    for each in (revoked, kept):
        fill(each.writer)
    first, second = revoked.open(1), kept.open(2)
    reader.fabric.arm(Imm(2), 256)
    pages = list(range(64))
    revoked.writer.fabric.submit_pages(first, page_writes(pages, pages, layers=(0, 4), dst=(1 << 19, 65536, 1024)))
    kept.writer.fabric.submit_pages(second, page_writes(pages, pages, layers=(0, 4)))
    kept.writer.fabric.submit_last(second)
    world.wait_for(lambda: reader.fabric.statistics().num_arrivals >= 2)
    reader.fabric.revoke(revoked.to_writer)
    kept.wait_reached(2, 256)
    assert kept.wait_done(second).num_failed == 0
    revoked.close(first)
    revoked.wait_done(first)
    for layer in range(4):
        at = layer * 65536
        np.testing.assert_array_equal(reader.memory[at : at + 65536], kept.writer.memory[at : at + 65536])


def test_connect_closes_the_transfers_opened_before(pair: Link) -> None:
    older = pair.open(1)
    pair.writer.fabric.submit_program(1, [(older, page_writes([0], [0], layers=(0, 2)))])
    pair.reader.fabric.revoke(pair.to_writer)
    pair.writer.fabric.connect(pair.to_reader, pair.reader.fabric.grant(pair.to_writer))
    done = pair.wait_done(older)
    assert (done.num_posted, done.complete) == (0, False)
    newer = pair.open(2)
    pair.writer.fabric.submit_program(2, [(newer, page_writes([1], [1], layers=(0, 2)))])
    pair.writer.fabric.raise_layers(3 * LAYERS_PER_STEP)
    pair.writer.fabric.submit_last(newer)
    assert pair.wait_done(newer).num_posted == 2
    pair.world.settle()
    assert [event.imm for event in pair.reader.told(Surplus)] == [2, 2]


def test_a_descriptor_survives_the_wire(pair: Link) -> None:
    wire = pair.descriptor.encode()
    assert type(pair.descriptor).decode(wire) == pair.descriptor
    assert pair.descriptor.length == len(pair.reader.memory)


@pytest.mark.parametrize(
    "wire", [b"", b"garbage", bytes(22), bytes([7]) * 30, bytes(21) + b"\1" + bytes(7), bytes(21) + b"\5" + bytes(40)]
)
def test_what_is_no_descriptor_is_refused(wire: bytes) -> None:
    with pytest.raises(InputError, match="descriptor"):
        Descriptor.decode(wire)


def test_descriptors_of_two_peers_have_different_keys(world: World) -> None:
    reader = world.side()
    assert link(world, reader=reader).descriptor.keys != link(world, reader=reader).descriptor.keys


def test_a_transfer_needs_a_connected_peer(world: World) -> None:
    writer, reader = world.side(), world.side()
    peer = writer.fabric.add_peer(reader.fabric.address)
    with pytest.raises(InputError, match="peer"):
        writer.fabric.open_transfer(peer, Imm(1))


def test_a_descriptor_older_than_the_one_in_use_is_refused(pair: Link) -> None:
    """A Hello that was overtaken by the next one must not bring back a revoked key."""
    fresh = pair.reader.fabric.grant(pair.to_writer)
    pair.writer.fabric.connect(pair.to_reader, fresh)
    with pytest.raises(InputError, match="descriptor"):
        pair.writer.fabric.connect(pair.to_reader, pair.descriptor)
    pair.arm(5, 1)
    write_one(pair, imm=5)
    pair.wait_reached(5, 1)


def test_an_address_is_one_peer(pair: Link) -> None:
    fabric, address = pair.writer.fabric, pair.reader.fabric.address
    assert fabric.peer_at(address) == pair.to_reader
    with pytest.raises(InputError, match="address"):
        fabric.add_peer(address)
    fabric.remove_peer(pair.to_reader)
    assert fabric.peer_at(address) is None
    with pytest.raises(InputError, match="address"):
        fabric.peer_at(b"")
