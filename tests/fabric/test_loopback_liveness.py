"""Peers of the simulated network that die, stand still or are cut off: who is told, when, and what ends by it."""

import errno
from dataclasses import replace

import pytest
from fabric_world import EVERY_DAY, Link, LoopbackWorld, Side, link, page_writes, write_one
from loopback_world import CALM, calm_pair, of, submit

from headrace.errors import InputError
from headrace.fabric.interface import Event, Imm, MessageReceived, PeerHeard, PeerLost, PeerSilent, SendFailed
from headrace.testing import Faults, LoopbackNetwork

ENDED = "its control connection ended"
SILENCE_S = 2.0


class HearingWorld(LoopbackWorld):
    """Whose endpoints miss each other's heartbeats."""

    def __init__(self, seed: int = 1, faults: Faults = EVERY_DAY) -> None:
        super().__init__(seed, faults)
        self.network = LoopbackNetwork(seed=seed, faults=faults, silence_s=SILENCE_S)


def die(world: LoopbackWorld, side: Side, how: str = "killed") -> None:
    if how == "killed":
        world.network.kill(of(side))
    side.close()


def liveness(side: Side) -> list[Event]:
    return [event for event in side.events if isinstance(event, PeerLost | PeerSilent | PeerHeard)]


def run_until(world: LoopbackWorld, at: float) -> None:
    world.network.run(deadline=at)
    for side in world.sides:
        if not side.closed:
            side.drain()


# ---- death -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["killed", "closed"])
def test_whoever_has_it_as_a_peer_is_told_of_a_death_once_and_nobody_else(how: str) -> None:
    world, pair = calm_pair(replace(CALM, death_noticed_s=(0.3, 0.5)))
    other, stranger = link(world, world.side(), pair.reader), link(world)
    die(world, pair.reader, how)
    run_until(world, 0.29)
    assert liveness(pair.writer) == []
    world.settle()
    assert 0.3 <= world.network.now <= 0.5
    assert liveness(pair.writer) == [PeerLost(peer=pair.to_reader, code=errno.ECONNRESET, text=ENDED)]
    assert [type(event) for event in liveness(other.writer)] == [PeerLost]
    assert liveness(stranger.writer) == liveness(stranger.reader) == []


def test_what_waits_for_a_lost_peer_fails_with_code_and_text_and_other_peers_do_not_notice() -> None:
    world, pair = calm_pair(replace(CALM, full_queue=1.0, queue_full_s=(0.01, 0.01), death_noticed_s=(0.1, 0.1)))
    other = link(world, pair.writer)
    queued, gated = submit(pair, imm=1, count=3), pair.open(2)
    pair.writer.fabric.submit_program(1, [(gated, page_writes([0], [0]))])
    unharmed = submit(other, imm=3)
    for message in (b"a", b"b", b"c"):
        pair.writer.fabric.send(pair.to_reader, message)
    die(world, pair.reader)
    run_until(world, 0.1)
    for transfer in (queued, gated):
        done = pair.writer.done(transfer)
        assert done is not None
        assert (done.num_posted, done.num_failed, done.complete) == (0, 0, False)
        assert (done.code, done.text) == (errno.ECONNRESET, f"control connection: {ENDED}")
    told = SendFailed(peer=pair.to_reader, code=errno.ECONNRESET, text=f"control connection: {ENDED}")
    assert pair.writer.told(SendFailed) == [told]
    assert pair.writer.done(unharmed) is None
    world.network.faults = CALM
    pair.writer.fabric.send(other.to_reader, b"d")
    world.settle()
    done = pair.writer.done(unharmed)
    assert done is not None and done.complete
    assert other.reader.messages() == [b"d"]


def test_what_was_posted_to_a_lost_peer_ends_as_the_network_says() -> None:
    faults = replace(CALM, delay_s=(1.0, 1.0), error_after_death=0.0, death_noticed_s=(0.1, 0.1))
    world, pair = calm_pair(faults)
    ended, going_on = submit(pair, imm=1, count=3), pair.open(2)
    pair.writer.fabric.submit_write(going_on, src_offset=0, dst_offset=0, length=4096)
    assert world.network.step()  # posted
    die(world, pair.reader)
    run_until(world, 0.5)
    assert [type(event) for event in pair.writer.events] == [PeerLost]
    world.settle()
    first, second = pair.writer.done(ended), pair.writer.done(going_on)
    assert first is not None and second is not None
    assert (first.num_posted, first.complete, first.code) == (3, True, 0)
    assert (second.num_posted, second.complete, second.code) == (1, False, errno.ECONNRESET)


def test_a_peer_that_is_added_when_it_is_dead_is_lost_too_and_one_that_was_removed_is_not() -> None:
    world, pair = calm_pair()
    late = world.side()
    die(world, pair.reader)
    added = late.fabric.add_peer(pair.reader.fabric.address)
    pair.writer.fabric.remove_peer(pair.to_reader)
    world.settle()
    assert [event.peer for event in late.told(PeerLost)] == [added]
    assert pair.writer.events == []


def test_a_peer_across_a_cut_is_lost_when_that_is_healed() -> None:
    world, pair = calm_pair()
    world.network.cut(of(pair.writer), of(pair.reader))
    die(world, pair.reader)
    world.settle()
    assert liveness(pair.writer) == []
    world.network.heal(of(pair.writer), of(pair.reader))
    world.settle()
    assert [type(event) for event in liveness(pair.writer)] == [PeerLost]


# ---- silence ---------------------------------------------------------------------------------------------------


def hearing_pair() -> tuple[LoopbackWorld, Link]:
    return calm_pair(kind=HearingWorld)


def test_a_peer_that_stands_still_is_told_silent_after_a_while_and_heard_when_it_wakes() -> None:
    world, pair = hearing_pair()
    stranger = world.side()
    transfer = submit(pair, count=200)
    world.network.hang(of(pair.reader))
    world.network.hang(of(pair.reader))
    run_until(world, SILENCE_S - 0.01)
    assert liveness(pair.writer) == []
    run_until(world, 10 * SILENCE_S)
    assert liveness(pair.writer) == [PeerSilent(peer=pair.to_reader)]
    assert pair.writer.done(transfer) is None, "silence ends nothing"
    for _ in range(2):
        world.network.wake(of(pair.reader))
    world.settle()
    assert liveness(pair.writer) == [PeerSilent(peer=pair.to_reader), PeerHeard(peer=pair.to_reader)]
    assert pair.wait_done(transfer).complete
    assert liveness(pair.reader) == stranger.events == []


def test_of_a_cut_pair_both_are_told_and_nobody_else() -> None:
    world, pair = hearing_pair()
    other = link(world, pair.writer)
    world.network.cut(of(pair.writer), of(pair.reader))
    world.settle()
    assert world.network.now == SILENCE_S
    assert liveness(pair.writer) == [PeerSilent(peer=pair.to_reader)]
    assert liveness(pair.reader) == [PeerSilent(peer=pair.to_writer)]
    world.network.heal(of(pair.writer), of(pair.reader))
    world.settle()
    assert liveness(pair.writer)[1:] == [PeerHeard(peer=pair.to_reader)]
    assert liveness(pair.reader)[1:] == [PeerHeard(peer=pair.to_writer)]
    assert liveness(other.reader) == []


def test_a_short_pause_is_no_silence_and_a_second_one_begins_anew() -> None:
    world, pair = hearing_pair()
    for _ in range(3):
        world.network.hang(of(pair.reader))
        run_until(world, world.network.now + 0.9 * SILENCE_S)
        world.network.wake(of(pair.reader))
    world.settle()
    assert liveness(pair.writer) == []


def test_who_wakes_behind_a_cut_is_not_heard_before_that_is_healed() -> None:
    world, pair = hearing_pair()
    world.network.hang(of(pair.reader))
    world.network.cut(of(pair.writer), of(pair.reader))
    world.settle()
    world.network.wake(of(pair.reader))
    world.settle()
    assert liveness(pair.writer) == [PeerSilent(peer=pair.to_reader)]
    world.network.heal(of(pair.writer), of(pair.reader))
    world.settle()
    assert liveness(pair.writer) == [PeerSilent(peer=pair.to_reader), PeerHeard(peer=pair.to_reader)]


def test_one_that_dies_while_it_stands_still_is_lost_and_never_heard() -> None:
    world, pair = hearing_pair()
    world.network.hang(of(pair.reader))
    die(world, pair.reader)
    world.network.wake(of(pair.reader))
    world.settle()
    assert [type(event) for event in liveness(pair.writer)] == [PeerLost]


def test_without_a_silence_s_nobody_is_ever_told_silent() -> None:
    world, pair = calm_pair()
    world.network.hang(of(pair.reader))
    world.network.advance(1e6)
    world.settle()
    world.network.wake(of(pair.reader))
    world.settle()
    assert pair.writer.events == []


def test_a_silence_in_the_past_is_refused() -> None:
    with pytest.raises(InputError, match="silence_s"):
        LoopbackNetwork(seed=1, silence_s=-1.0)


# ---- deadlines of lists ----------------------------------------------------------------------------------------


def test_a_list_whose_deadline_passes_before_its_peer_takes_it_ends_with_what_was_posted() -> None:
    world, pair = calm_pair()
    transfer = pair.writer.fabric.open_transfer(pair.to_reader, Imm(1), deadline_s=5.0)
    for i in range(100):
        pair.writer.fabric.submit_write(transfer, src_offset=i * 4096, dst_offset=i * 4096, length=4096)
    pair.writer.fabric.submit_last(transfer)
    world.network.hang(of(pair.reader))
    run_until(world, 4.99)
    world.network.run(deadline=5.0)
    world.network.wake(of(pair.reader))
    world.settle()
    done = pair.writer.done(transfer)
    assert done is not None
    assert (done.num_posted, done.num_failed, done.complete) == (64, 0, False)  # the window
    assert (done.code, done.text) == (errno.ETIMEDOUT, "its deadline passed")


def test_a_peer_is_written_to_as_before_after_a_list_was_late() -> None:
    world, pair = calm_pair()
    late = pair.writer.fabric.open_transfer(pair.to_reader, Imm(1), deadline_s=0.0)
    assert not pair.wait_done(late).complete
    assert write_one(pair, imm=2).complete
    pair.writer.fabric.send(pair.to_reader, b"x")
    world.settle()
    assert pair.reader.told(MessageReceived) == [MessageReceived(message=b"x")]
