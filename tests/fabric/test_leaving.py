"""Conformance: peers that leave, ids that nobody knows, endpoints that close."""

import select

import numpy as np
import pytest
from fabric_world import Link, World, page_writes, poisoned, write_one

from headrace.errors import Closed, InputError
from headrace.fabric.interface import LAYERS_PER_STEP, Imm, PeerId, TransferId


def test_a_removed_peer_is_forgotten_and_its_transfers_are_told_done(pair: Link) -> None:
    waiting, ended = pair.open(1), pair.open(2)
    pair.writer.fabric.submit_program(1, [(waiting, page_writes([0], [0]))])
    pair.writer.fabric.submit_last(ended)
    pair.wait_done(ended)
    pair.writer.fabric.remove_peer(pair.to_reader)
    done = pair.wait_done(waiting)
    assert (done.num_posted, done.complete) == (0, False)
    with pytest.raises(InputError, match="peer"):
        pair.writer.fabric.send(pair.to_reader, b"gone")
    with pytest.raises(InputError, match="peer"):
        pair.writer.fabric.open_transfer(pair.to_reader, Imm(3))
    pair.writer.fabric.raise_layers(5 * LAYERS_PER_STEP)
    pair.world.settle()
    assert pair.writer.fabric.statistics().num_peers_now == 0
    assert pair.writer.fabric.statistics().num_transfers_now == 0
    assert pair.reader.fabric.statistics().num_arrivals == 0


def test_a_peer_removed_in_full_flight_ends_its_transfer_at_once(pair: Link) -> None:
    transfer = pair.open(1)
    pair.writer.fabric.submit_pages(transfer, page_writes(list(range(64)), list(range(64)), layers=(0, 16)))
    pair.world.wait_for(lambda: pair.reader.fabric.statistics().num_arrivals >= 1)
    pair.writer.fabric.remove_peer(pair.to_reader)
    done = pair.wait_done(transfer)
    assert 1 <= done.num_posted <= 1024
    assert not done.complete
    if done.num_failed:
        assert done.code > 0
        assert done.text
    pair.world.settle()
    assert pair.reader.fabric.statistics().num_arrivals <= done.num_posted


def test_a_removed_peer_may_not_write_here_any_more(pair: Link) -> None:
    pair.reader.fabric.remove_peer(pair.to_writer)
    pair.world.settle()  # over mapped memory the writer lets go of it meanwhile
    write_one(pair, imm=6)
    pair.world.settle()
    np.testing.assert_array_equal(pair.reader.memory, poisoned(pair.reader))
    again = pair.reader.fabric.add_peer(pair.writer.fabric.address)
    pair.writer.fabric.connect(pair.to_reader, pair.reader.fabric.grant(again))
    pair.reader.fabric.arm(Imm(8), 1)
    write_one(pair, imm=8)
    pair.wait_reached(8, 1)


def test_unknown_ids_are_refused(pair: Link) -> None:
    fabric = pair.writer.fabric
    nobody, nothing = PeerId(1 << 20), TransferId(1 << 40)
    for call in (fabric.remove_peer, fabric.grant, fabric.revoke):
        with pytest.raises(InputError, match="peer"):
            call(nobody)
    with pytest.raises(InputError, match="peer"):
        fabric.send(nobody, b"x")
    with pytest.raises(InputError, match="peer"):
        fabric.connect(nobody, pair.descriptor)
    with pytest.raises(InputError, match="peer"):
        fabric.open_transfer(nobody, Imm(1))
    with pytest.raises(InputError, match="transfer"):
        fabric.close_transfer(nothing)
    with pytest.raises(InputError, match="transfer"):
        fabric.submit_last(nothing)
    with pytest.raises(InputError, match="transfer"):
        fabric.submit_pages(nothing, page_writes([0], [0]))
    with pytest.raises(InputError, match="transfer"):
        fabric.submit_write(nothing, src_offset=0, dst_offset=0, length=0)
    with pytest.raises(InputError, match="address"):
        fabric.add_peer(b"")


def test_every_endpoint_has_its_own_address(world: World) -> None:
    assert len({world.side().fabric.address for _ in range(3)}) == 3


def test_close_may_be_repeated_and_everything_else_then_raises_closed(pair: Link) -> None:
    transfer = pair.open(1)
    pair.writer.fabric.submit_program(1, [(transfer, page_writes([0], [0]))])
    fabric = pair.writer.fabric
    pair.writer.close()
    fabric.close()
    calls = [
        lambda: fabric.add_peer(pair.reader.fabric.address),
        lambda: fabric.remove_peer(pair.to_reader),
        lambda: fabric.grant(pair.to_reader),
        lambda: fabric.revoke(pair.to_reader),
        lambda: fabric.connect(pair.to_reader, pair.descriptor),
        lambda: fabric.send(pair.to_reader, b"x"),
        lambda: fabric.arm(Imm(1), 1),
        lambda: fabric.retarget(Imm(1), 1),
        lambda: fabric.disarm(Imm(1)),
        lambda: fabric.open_transfer(pair.to_reader, Imm(1)),
        lambda: fabric.submit_write(transfer, src_offset=0, dst_offset=0, length=0),
        lambda: fabric.submit_pages(transfer, page_writes([0], [0])),
        lambda: fabric.submit_last(transfer),
        lambda: fabric.submit_program(2, []),
        lambda: fabric.raise_layers(1),
        lambda: fabric.fail_step(1),
        lambda: fabric.close_transfer(transfer),
        lambda: fabric.submit_digest([], 0),
        lambda: fabric.drain_events(),
        lambda: fabric.statistics(),
    ]
    for call in calls:
        with pytest.raises(Closed):
            call()


def test_an_endpoint_closes_with_everything_under_way(pair: Link) -> None:
    """Half received writes, queued messages, gated programs: close must neither hang nor crash on either side."""
    transfer = pair.open(1)
    pair.writer.fabric.submit_pages(transfer, page_writes(list(range(64)), list(range(64)), layers=(0, 16)))
    pair.writer.fabric.send(pair.to_reader, bytes(1 << 20))
    pair.world.wait_for(lambda: pair.reader.fabric.statistics().num_arrivals >= 1)
    for side in (pair.reader, pair.writer):
        side.close()


def test_the_event_fd_is_readable_exactly_while_events_wait(pair: Link) -> None:
    def readable() -> bool:
        return bool(select.select([pair.reader.fabric.event_fd], [], [], 0)[0])

    pair.world.settle()
    assert not readable()
    pair.reader.fabric.arm(Imm(3), 1)
    pair.reader.fabric.retarget(Imm(3), 0)
    if pair.world.name == "native":
        assert select.select([pair.reader.fabric.event_fd], [], [], 10.0)[0]
    assert readable()
    pair.world.settle()
    assert pair.reader.reached(3) == [0]
    assert not readable()


def test_a_new_fabric_has_nothing_to_tell(world: World) -> None:
    side = world.side()
    assert side.fabric.drain_events() == []
    statistics = side.fabric.statistics()
    assert statistics.provider
    assert (statistics.num_peers_now, statistics.num_transfers_now, statistics.num_counters_now) == (0, 0, 0)
