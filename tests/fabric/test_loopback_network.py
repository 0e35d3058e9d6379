"""The simulated network's clock, steps and adversary: kill, hang, cut; and that a seed decides everything."""

import errno
from dataclasses import replace

import numpy as np
import pytest
from fabric_world import EVERY_DAY, LoopbackWorld, fill, link, page_writes
from loopback_world import CALM, arrivals, calm_pair, landed, of, submit, untouched

from headrace.errors import Closed, InputError
from headrace.fabric.interface import Event, PeerLost, SendFailed, TransferDone
from headrace.testing import LoopbackFabric, LoopbackNetwork


def history(seed: int) -> tuple[list[Event], list[Event], float]:
    world, pair = calm_pair(EVERY_DAY, seed=seed)
    pair.arm(7, 100)
    submit(pair, count=100)
    for i in range(10):
        pair.writer.fabric.send(pair.to_reader, bytes([i]))
    world.settle()
    return pair.writer.events, pair.reader.events, world.network.now


def test_a_seed_decides_the_whole_history() -> None:
    assert history(5) == history(5)
    assert history(5)[2] != history(6)[2]


def test_a_step_makes_one_delivery_that_is_due() -> None:
    world, pair = calm_pair(replace(CALM, delay_s=(1.0, 1.0)))
    pair.writer.fabric.send(pair.to_reader, b"a")
    assert world.network.next_due() == 0.0
    assert world.network.step()  # the writer's turn
    assert not world.network.step()
    assert world.network.next_due() == 1.0
    world.network.advance(0.5)
    assert not world.network.step()
    world.network.advance(0.5)
    assert world.network.step()
    assert pair.reader.drain() == 1
    assert world.network.next_due() is None


def test_run_stops_at_its_deadline() -> None:
    world, pair = calm_pair(replace(CALM, delay_s=(1.0, 1.0)))
    pair.writer.fabric.send(pair.to_reader, b"a")
    assert not world.network.run(until=lambda: pair.reader.drain() > 0, deadline=0.7)
    assert world.network.now == 0.7
    assert world.network.run(until=lambda: pair.reader.drain() > 0, deadline=1.7)
    assert world.network.now == 1.0


def test_the_clock_does_not_run_backwards() -> None:
    with pytest.raises(InputError, match="seconds"):
        LoopbackNetwork(seed=1).advance(-0.1)


def test_memory_of_another_shape_is_refused() -> None:
    with pytest.raises(InputError, match="memory"):
        LoopbackFabric(LoopbackNetwork(seed=1), np.zeros((2, 2), dtype=np.uint8))
    with pytest.raises(InputError, match="memory"):
        LoopbackFabric(LoopbackNetwork(seed=1), np.zeros(8, dtype=np.int16))  # type: ignore[arg-type]


@pytest.mark.parametrize("survives", [True, False])
def test_posted_writes_of_a_killed_writer_may_still_land(survives: bool) -> None:
    world, pair = calm_pair(replace(CALM, delay_s=(1.0, 1.0), write_survives_death=float(survives)))
    before = pair.writer.memory.copy()
    submit(pair, count=2)
    assert world.network.step()  # posted
    world.network.kill(of(pair.writer))
    pair.writer.closed = True
    pair.writer.memory[:] = 0  # the dead process's memory is somebody else's now
    world.settle()
    assert arrivals(pair) == (2 if survives else 0)
    assert untouched(pair) is not survives
    if survives:
        np.testing.assert_array_equal(pair.reader.memory[:8192], before[:8192])


def test_nothing_new_comes_from_a_killed_writer_and_its_calls_raise() -> None:
    world, pair = calm_pair()
    submit(pair, count=200)  # beyond the window and not posted yet
    pair.writer.fabric.send(pair.to_reader, b"unsent")
    world.network.kill(of(pair.writer))
    pair.writer.closed = True
    world.settle()
    assert untouched(pair)
    assert [type(event) for event in pair.reader.events] == [PeerLost]
    with pytest.raises(Closed):
        pair.writer.fabric.statistics()


@pytest.mark.parametrize("error", [True, False])
def test_writes_and_messages_to_a_killed_reader_fail_late_or_vanish(error: bool) -> None:
    world, pair = calm_pair(replace(CALM, error_after_death=float(error)))
    world.network.kill(of(pair.reader))
    pair.reader.closed = True
    transfer = submit(pair, count=10)
    pair.writer.fabric.send(pair.to_reader, b"anybody there?")
    world.settle()
    done = pair.writer.done(transfer)
    assert done is not None
    assert (done.num_posted, done.num_failed) == (10, 10 if error else 0)
    assert len(pair.writer.told(SendFailed)) == error
    assert untouched(pair)
    if error:
        assert 0.012 <= world.network.now <= 0.7


def test_after_a_death_was_noticed_its_peer_stays_parked_for_ever() -> None:
    """EAGAIN without end, as measured; only closing the list or removing the peer ends the transfer."""
    world, pair = calm_pair(replace(CALM, error_after_death=1.0))
    world.network.kill(of(pair.reader))
    pair.reader.closed = True
    pair.wait_done(submit(pair))
    world.settle()  # what waits when the connection is seen to be broken ends; what comes later is parked
    parked = submit(pair, count=3)
    world.settle()
    assert pair.writer.done(parked) is None
    pair.writer.fabric.remove_peer(pair.to_reader)
    done = pair.wait_done(parked)
    assert (done.num_posted, done.complete) == (0, False)


def test_messages_after_a_noticed_death_stay_queued_and_are_dropped_untold_with_their_peer() -> None:
    """As measured on the native fabric: 20 messages to a killed reader, told neither then nor at its removal."""
    world, pair = calm_pair(replace(CALM, error_after_death=1.0))
    world.network.kill(of(pair.reader))
    pair.reader.closed = True
    pair.writer.fabric.send(pair.to_reader, b"noticed")
    world.settle()
    assert len(pair.writer.told(SendFailed)) == 1
    for _ in range(20):
        pair.writer.fabric.send(pair.to_reader, b"queued")
        world.settle()
    pair.writer.fabric.remove_peer(pair.to_reader)
    world.settle()
    assert len(pair.writer.told(SendFailed)) == 1


def test_a_message_that_finds_64_mib_of_others_waiting_fails_at_once() -> None:
    world, pair = calm_pair()
    world.network.hang(of(pair.writer))  # posts nothing
    for _ in range(4):
        pair.writer.fabric.send(pair.to_reader, bytes(16 << 20))
    assert pair.writer.drain() == 0
    pair.writer.fabric.send(pair.to_reader, b"one too many")
    pair.writer.drain()
    (failed,) = pair.writer.told(SendFailed)
    assert (failed.peer, failed.code) == (pair.to_reader, errno.ENOBUFS)
    world.network.wake(of(pair.writer))
    world.settle()
    assert [len(message) for message in pair.reader.messages()] == [16 << 20] * 4
    pair.writer.fabric.send(pair.to_reader, b"there is room again")
    world.settle()
    assert pair.reader.messages()[4:] == [b"there is room again"]


def test_of_a_removed_peer_no_message_is_told_as_failed() -> None:
    world, pair = calm_pair(replace(CALM, delay_s=(1.0, 1.0), fail_message=1.0))
    pair.writer.fabric.send(pair.to_reader, b"failing")
    assert world.network.step()  # posted
    pair.writer.fabric.remove_peer(pair.to_reader)
    world.settle()
    assert not pair.writer.told(SendFailed)


def test_a_hung_reader_receives_nothing_until_it_wakes() -> None:
    world, pair = calm_pair()
    world.network.hang(of(pair.reader))
    transfer = submit(pair, count=200)
    pair.writer.fabric.send(pair.to_reader, b"hello")
    world.settle()
    assert untouched(pair)
    assert not pair.reader.events
    assert pair.writer.fabric.statistics().num_writes_posted == 64  # the window, no more
    assert pair.writer.done(transfer) is None
    world.network.wake(of(pair.reader))
    world.settle()
    assert landed(pair, end=200 * 4096)
    assert pair.reader.messages() == [b"hello"]
    assert pair.writer.done(transfer) is not None


def test_a_hung_writer_posts_and_completes_nothing_until_it_wakes() -> None:
    world, pair = calm_pair(replace(CALM, delay_s=(0.01, 0.01)))
    early = submit(pair, imm=1)
    assert world.network.step()  # posted
    late = submit(pair, imm=2, dst=8192)
    world.network.hang(of(pair.writer))
    world.settle()
    assert arrivals(pair) == 1  # what was posted is on its way
    assert pair.writer.events == []
    world.network.wake(of(pair.writer))
    world.settle()
    assert {done.transfer for done in pair.writer.told(TransferDone)} == {early, late}


def test_one_hung_peer_does_not_stop_another() -> None:
    world = LoopbackWorld(seed=1, faults=CALM)
    writer = world.side()
    hung, other = link(world, writer), link(world, writer)
    fill(writer)
    world.network.hang(of(hung.reader))
    stuck = submit(hung, imm=1, count=200)
    through = submit(other, imm=2, count=200)
    world.settle()
    assert landed(other, end=200 * 4096)
    assert writer.done(through) is not None
    assert writer.done(stuck) is None


def test_a_hung_process_that_is_killed_never_wakes() -> None:
    world, pair = calm_pair(replace(CALM, error_after_death=1.0))
    world.network.hang(of(pair.reader))
    transfer = submit(pair)
    world.settle()
    world.network.kill(of(pair.reader))
    pair.reader.closed = True
    assert pair.wait_done(transfer).num_failed == 1
    assert untouched(pair)


def test_a_cut_pair_passes_nothing_either_way_until_it_heals() -> None:
    world = LoopbackWorld(seed=1, faults=CALM)
    writer, reader = world.side(), world.side()
    pair, other = link(world, writer, reader), link(world, writer)
    fill(writer)
    world.network.cut(of(writer), of(reader))
    transfer = submit(pair)
    writer.fabric.send(pair.to_reader, b"there")
    reader.fabric.send(pair.to_writer, b"back")
    writer.fabric.send(other.to_reader, b"unharmed")
    world.settle()
    assert untouched(pair)
    assert not writer.events
    assert not reader.events
    assert other.reader.messages() == [b"unharmed"]
    world.network.heal(of(writer), of(reader))
    world.settle()
    assert landed(pair)
    assert writer.done(transfer) is not None
    assert (reader.messages(), writer.messages()) == ([b"there"], [b"back"])


def test_a_write_in_a_cut_link_lands_long_after_a_removal_unless_revoked() -> None:
    """The late write that PROTOCOL's quarantine is about."""
    for revoked in (False, True):
        world, pair = calm_pair()
        world.network.cut(of(pair.writer), of(pair.reader))
        submit(pair)
        world.settle()
        pair.writer.fabric.remove_peer(pair.to_reader)
        world.network.advance(3600.0)
        if revoked:
            pair.reader.fabric.revoke(pair.to_writer)
        world.network.heal(of(pair.writer), of(pair.reader))
        world.settle()
        assert landed(pair) is not revoked
        assert untouched(pair) is revoked


def test_peers_are_served_in_turn() -> None:
    """While the first peer has a long list, the second one's single write does not wait for its end."""
    world = LoopbackWorld(seed=1, faults=replace(CALM, delay_s=(0.001, 0.001)))
    writer = world.side()
    busy, brief = link(world, writer), link(world, writer)
    first = busy.open(1)
    pages = page_writes(list(range(1000)), list(range(1000)), length=256, src=(0, 0, 1024), dst=(0, 0, 1024))
    writer.fabric.submit_pages(first, pages)
    second = submit(brief, imm=2)
    world.wait_for(lambda: writer.done(second) is not None)
    assert busy.reader.fabric.statistics().num_arrivals < 200
    assert writer.fabric.close_transfer(first) < 1000


def test_the_network_and_its_endpoints_show_their_state() -> None:
    world, pair = calm_pair(replace(CALM, delay_s=(1.0, 1.0)))
    submit(pair, count=3)
    assert world.network.step()
    assert "in_flight=3" in repr(pair.writer.fabric)
    assert "transfers=1" in repr(pair.writer.fabric)
    assert "endpoints=2" in repr(world.network)
    assert "waiting=3" in repr(world.network)
