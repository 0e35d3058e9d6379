"""Access on a loopback network where it ends when the writer lets go: what may land until then, and what is told."""

from dataclasses import replace

import pytest
from fabric_world import Link, LoopbackWorld, fill, link, write_one
from loopback_world import CALM, LettingGoWorld, arrivals, calm_pair, landed, of, submit, untouched

from headrace.errors import InputError
from headrace.fabric.interface import PeerId, Revoked
from headrace.testing import Faults

SLOW = replace(CALM, delay_s=(1.0, 1.0))


def lingering_pair(faults: Faults = CALM, *, seed: int = 1) -> tuple[LoopbackWorld, Link]:
    return calm_pair(faults, seed=seed, kind=LettingGoWorld)


def revoked(pair: Link) -> list[PeerId]:
    """Whose access was told to have ended."""
    return [event.peer for event in pair.reader.told(Revoked)]


def test_access_of_a_writer_that_never_connected_ends_at_once() -> None:
    world = LettingGoWorld(seed=1, faults=CALM)
    writer, reader = world.side(), world.side()
    peer = reader.fabric.add_peer(writer.fabric.address)
    assert reader.fabric.revoke(peer)
    descriptor = reader.fabric.grant(peer)
    assert descriptor.addressing == "mapped"
    assert reader.fabric.revoke(peer)
    to_reader = writer.fabric.add_peer(reader.fabric.address)
    writer.fabric.connect(to_reader, descriptor)  # too late
    fill(writer)
    write_one(Link(world, writer, reader, to_reader, peer, descriptor), imm=1)
    world.settle()
    assert not reader.told(Revoked)
    assert (reader.memory == 0xA5).all()


def test_writes_land_and_are_counted_until_the_writer_has_let_go_and_nowhere_after() -> None:
    world, pair = lingering_pair()
    pair.arm(7, 1)
    submit(pair)
    assert world.network.step()  # posted
    assert not pair.reader.fabric.revoke(pair.to_writer)
    world.settle()
    assert landed(pair)
    assert pair.reader.reached(7) == [1]
    assert revoked(pair) == [pair.to_writer]
    write_one(pair, imm=8, dst=8192)
    world.settle()
    assert arrivals(pair) == 1
    assert landed(pair) and not landed(pair, begin=8192, end=12288)
    assert pair.reader.fabric.revoke(pair.to_writer)


def test_a_hung_writer_does_not_let_go_and_what_it_posted_lands_long_after_the_revoke() -> None:
    world, pair = lingering_pair(SLOW)
    submit(pair)
    assert world.network.step()  # posted
    world.network.hang(of(pair.writer))
    assert not pair.reader.fabric.revoke(pair.to_writer)
    world.settle()
    world.network.advance(3600.0)
    assert landed(pair)
    assert revoked(pair) == []
    world.network.wake(of(pair.writer))
    world.settle()
    assert revoked(pair) == [pair.to_writer]


def test_a_writer_that_wakes_may_write_on_before_it_is_told() -> None:
    """In some order of what waited for it, the rest of its list goes out first; in another nothing does."""
    numbers = set()
    for seed in range(20):
        world, pair = lingering_pair(replace(CALM, reorder=True), seed=seed)
        world.network.hang(of(pair.writer))
        transfer = submit(pair, count=8)
        assert not pair.reader.fabric.revoke(pair.to_writer)
        world.settle()
        assert untouched(pair)
        world.network.wake(of(pair.writer))
        world.settle()
        pair.wait_done(transfer)
        assert revoked(pair) == [pair.to_writer]
        numbers.add(arrivals(pair))
    assert 0 in numbers
    assert len(numbers) > 1


def test_a_cut_does_not_keep_a_writer_of_the_same_host_from_letting_go() -> None:
    world, pair = lingering_pair()
    world.network.cut(of(pair.writer), of(pair.reader))
    submit(pair)
    assert not pair.reader.fabric.revoke(pair.to_writer)
    world.settle()
    assert revoked(pair) == [pair.to_writer]
    world.network.heal(of(pair.writer), of(pair.reader))
    world.settle()
    assert untouched(pair)


@pytest.mark.parametrize("first", ["hung", "running"])
def test_the_death_of_a_writer_ends_its_access_and_nothing_of_it_lands_any_more(first: str) -> None:
    world, pair = lingering_pair(replace(SLOW, write_survives_death=1.0))
    submit(pair)
    assert world.network.step()  # posted
    if first == "hung":
        world.network.hang(of(pair.writer))
    assert not pair.reader.fabric.revoke(pair.to_writer)
    world.network.kill(of(pair.writer))
    pair.writer.closed = True
    world.settle()
    assert revoked(pair) == [pair.to_writer]
    assert untouched(pair)


def test_access_of_a_writer_that_is_dead_ends_at_once() -> None:
    world, pair = lingering_pair(replace(SLOW, write_survives_death=1.0))
    submit(pair)
    assert world.network.step()  # posted
    world.network.kill(of(pair.writer))
    pair.writer.closed = True
    assert pair.reader.fabric.revoke(pair.to_writer)
    world.settle()
    assert revoked(pair) == []
    assert untouched(pair)


def test_a_hung_reader_is_told_when_it_wakes() -> None:
    world, pair = lingering_pair()
    assert not pair.reader.fabric.revoke(pair.to_writer)
    world.network.hang(of(pair.reader))
    world.settle()
    assert revoked(pair) == []
    world.network.wake(of(pair.reader))
    world.settle()
    assert revoked(pair) == [pair.to_writer]


def test_the_end_is_told_once_however_often_access_is_revoked() -> None:
    world, pair = lingering_pair()
    for _ in range(3):
        assert not pair.reader.fabric.revoke(pair.to_writer)
    world.settle()
    assert pair.reader.fabric.revoke(pair.to_writer)
    world.settle()
    assert revoked(pair) == [pair.to_writer]


def test_nothing_is_told_of_a_peer_that_was_removed_but_its_access_ends_all_the_same() -> None:
    world, pair = lingering_pair()
    pair.reader.fabric.remove_peer(pair.to_writer)
    world.settle()
    assert revoked(pair) == []
    write_one(pair, imm=1)
    world.settle()
    assert untouched(pair)


def test_the_end_of_an_older_access_is_not_told_while_there_is_a_newer_one() -> None:
    world, pair = lingering_pair()
    assert not pair.reader.fabric.revoke(pair.to_writer)
    fresh = pair.reader.fabric.grant(pair.to_writer)
    world.settle()
    write_one(pair, imm=1)  # with the older key
    world.settle()
    assert (revoked(pair), untouched(pair)) == ([], True)
    pair.writer.fabric.connect(pair.to_reader, fresh)
    write_one(pair, imm=2)
    assert landed(pair)
    assert not pair.reader.fabric.revoke(pair.to_writer)
    world.settle()
    assert revoked(pair) == [pair.to_writer]


def test_the_end_is_not_told_of_a_peer_that_was_granted_access_anew_meanwhile() -> None:
    world, pair = lingering_pair()
    assert not pair.reader.fabric.revoke(pair.to_writer)
    assert world.network.step()  # the writer has let go
    pair.reader.fabric.grant(pair.to_writer)
    world.settle()
    assert revoked(pair) == []


def test_the_end_of_several_accesses_is_told_once() -> None:
    world, pair = lingering_pair()
    pair.writer.fabric.connect(pair.to_reader, pair.reader.fabric.grant(pair.to_writer))
    assert not pair.reader.fabric.revoke(pair.to_writer)
    world.settle()
    assert revoked(pair) == [pair.to_writer]


def test_the_rest_of_a_half_landed_write_misses_the_memory_once_its_writer_has_let_go() -> None:
    world, pair = lingering_pair(replace(CALM, split_write=1.0, late_write=1.0, late_s=(1.0, 1.0)), seed=4)
    submit(pair)
    world.wait_for(lambda: not untouched(pair))
    assert not pair.reader.fabric.revoke(pair.to_writer)
    world.wait_for(lambda: bool(revoked(pair)))
    assert not landed(pair)
    pair.reader.memory[:] = 0xA5
    world.settle()
    assert untouched(pair)


def test_another_writer_is_not_disturbed_by_one_that_does_not_let_go() -> None:
    world = LettingGoWorld(seed=1, faults=CALM)
    reader = world.side()
    hung, other = link(world, reader=reader), link(world, reader=reader)
    fill(other.writer)
    world.network.hang(of(hung.writer))
    assert not reader.fabric.revoke(hung.to_writer)
    other.arm(2, 1)
    assert write_one(other, imm=2).num_failed == 0
    other.wait_reached(2, 1)
    assert landed(other)
    assert revoked(other) == []


def test_the_loopback_is_one_transport_and_cuts_nothing() -> None:
    _, pair = calm_pair()
    fabric = pair.writer.fabric
    assert fabric.transport(pair.to_reader) == fabric.statistics().provider == "loopback"
    assert {fabric.num_cuts(pair.to_reader, length) for length in (0, 1, 1 << 30)} == {1}
    with pytest.raises(InputError, match="length"):
        fabric.num_cuts(pair.to_reader, -1)
    for call in (fabric.transport, lambda peer: fabric.num_cuts(peer, 1)):
        with pytest.raises(InputError, match="peer"):
            call(PeerId(99))
