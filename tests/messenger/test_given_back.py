"""How long a ticket costs anybody anything after its request has ended: both sides, in every state, by the network's
clock. `BOUND_S` is what docs/protocol.md promises.

Messages and writes take up to 50 ms here. What a running forward pass reads and writes outlives the bound until that
pass has ended; what a prefiller that hangs may still write stays quarantined. Either can be seen.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from kv_world import DecoderProcess, LoopbackSite, PrefillerProcess, Request, pair, run_prompts

from headrace.messenger.outcomes import Ready
from headrace.testing import Faults, Revocation

BOUND_S = 1.0
LENGTH = 22  # 21 tokens to prefill: three steps, six pages
NUM_LENT = 6
REMAINING_S = 20.0
SLOW = Faults(delay_s=(0.0, 0.05), reorder=True, early_completion=0.3, late_completion=0.3, late_s=(0.0, 0.2))
LOST = Faults(lose_message=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What one side has that is not free for the next request."""

    pages_held: int = 0
    pages_quarantined: int = 0
    tickets: int = 0  # each has a slot, that is a counter and an aux slot; at the prefiller a staging slot
    counters: int = 0
    lists: int = 0
    leased_tokens: int = 0


NOTHING = Costs()


class World:
    def __init__(self, revocation: Revocation = "at once") -> None:
        self.site = LoopbackSite(seed=7, revocation=revocation)
        self.network = self.site.network
        self.prefiller, self.decoder, self.peer = pair(self.site)
        self.sides: tuple[PrefillerProcess | DecoderProcess, ...] = (self.prefiller, self.decoder)
        self.network.faults = SLOW

    def open(self, remaining_s: float = REMAINING_S) -> Request:
        request = self.decoder.reserve("a", tuple(range(100, 100 + LENGTH)))
        lease = self.prefiller.lease("a", LENGTH)
        assert request is not None and lease is not None
        assert self.decoder.open(request, self.peer, lease, remaining_s=remaining_s) is not None
        return request

    def turn(self) -> None:
        self.prefiller.turn()
        self.decoder.turn()

    def pass_time(self, seconds: float) -> None:
        """What is due happens when it is due."""
        end = self.site.now + seconds
        while True:
            self.turn()
            if self.network.step():
                continue
            dues = [self.network.next_due(), *(side.messenger.next_due() for side in self.sides if side.runs)]
            due = min((at for at in dues if at is not None), default=end)
            if due >= end:
                break
            self.network.advance(max(0.0, due - self.site.now))
        self.network.advance(end - self.site.now)
        self.turn()

    def arrive(self) -> None:
        """The Prefill is there."""
        self.pass_time(0.06)
        assert self.prefiller.prompts

    @property
    def at_decoder(self) -> Costs:
        self.decoder.messenger.check()
        pages, told = self.decoder.pool.statistics(), self.decoder.messenger.statistics()
        assert pages.num_quarantined == told.num_quarantined_pages, "a quarantine that nobody tells of"
        return Costs(
            pages_held=pages.num_held,
            pages_quarantined=pages.num_quarantined,
            tickets=told.num_open,
            counters=self.decoder.fabric.statistics().num_counters_now,
        )

    @property
    def at_prefiller(self) -> Costs:
        self.prefiller.messenger.check()
        told = self.prefiller.messenger.statistics()
        return Costs(
            pages_held=self.prefiller.pool.statistics().num_held,
            tickets=told.num_tickets,
            lists=self.prefiller.fabric.statistics().num_transfers_now,
            leased_tokens=told.num_leased_tokens,
        )

    def finish(self, request: Request) -> None:
        """The role's part, as soon as it hears the answer."""
        self.decoder.turn()
        assert len(request.answers) == 1, "it was not answered at once"
        self.decoder.finish(request)

    def settle_a_running_step(self) -> None:
        if self.prefiller.running is not None:
            while self.prefiller.compute_layer():
                pass
            self.prefiller.end_step()


# ---- states ----------------------------------------------------------------------------------------------------


def on_its_way(world: World) -> None:
    while world.network.step():
        world.turn()
    assert not world.prefiller.prompts


def queued(world: World) -> None:
    world.arrive()


def in_a_step(world: World) -> None:
    world.arrive()
    world.prefiller.begin_step()
    world.prefiller.compute_layer()
    world.turn()


def between_steps(world: World) -> None:
    in_a_step(world)
    world.settle_a_running_step()


def in_flight(world: World) -> None:
    """All of it is computed and posted, none of the last step's has landed."""
    world.arrive()
    while world.prefiller.begin_step():
        world.settle_a_running_step()
    assert world.at_prefiller.lists == 1


def being_compared(world: World) -> None:
    """Everything has landed; the digests are not compared yet."""
    in_flight(world)
    counted = world.decoder.fabric
    expected = 1 + NUM_LENT * world.decoder.model.layout.num_layers
    assert world.network.run(lambda: counted.statistics().num_arrivals == expected)
    world.decoder.turn()
    assert world.decoder.messenger.statistics().num_ready == 0


State = Callable[[World], None]
STATES: tuple[State, ...] = (on_its_way, queued, in_a_step, between_steps, in_flight, being_compared)
in_every_state = pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)


# ---- ends ------------------------------------------------------------------------------------------------------


def cancelled(world: World, request: Request) -> None:
    assert request.imm is not None
    world.decoder.messenger.cancel(request.imm, world.site.now)


def cancelled_and_the_message_lost(world: World, request: Request) -> None:
    world.network.faults = LOST
    cancelled(world, request)
    while world.network.step():
        pass
    world.network.faults = SLOW


def too_late(world: World, request: Request) -> None:
    """Its deadline passes: what is on its way then is late by as much as it still needed."""
    del request
    world.network.advance(REMAINING_S - world.site.now)


End = Callable[[World, Request], None]
ENDS: tuple[End, ...] = (cancelled, cancelled_and_the_message_lost, too_late)


@in_every_state
@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
def test_after_its_end_everything_is_given_back_within_the_bound(state: State, end: End) -> None:
    world = World()
    request = world.open()
    state(world)
    end(world, request)
    world.finish(request)
    at_once = world.at_decoder
    assert at_once.pages_held == 0, "pages that nobody wants, and that nobody sees"
    assert at_once.pages_quarantined in (0, NUM_LENT) and at_once.tickets == at_once.counters
    assert bool(at_once.pages_quarantined) == bool(at_once.tickets)
    world.pass_time(BOUND_S)
    assert world.at_decoder == NOTHING
    if world.prefiller.running is not None:  # and after thirty seconds more, should the pass take so long
        world.pass_time(30.0)
        assert world.at_prefiller == Costs(pages_held=NUM_LENT, tickets=1)
        world.settle_a_running_step()
    assert world.at_prefiller == NOTHING
    world.decoder.pool.look()
    world.prefiller.pool.look()


@pytest.mark.parametrize("revocation", ["at once", "when let go"])
@in_every_state
def test_what_a_prefiller_that_hangs_may_still_write_is_seen_in_quarantine_until_it_cannot(
    state: State, revocation: Revocation
) -> None:
    world = World(revocation)
    request = world.open()
    state(world)
    world.network.hang(world.prefiller.fabric)
    world.prefiller.hung = True
    cancelled(world, request)
    world.finish(request)
    world.pass_time(BOUND_S)
    waiting = Costs(pages_quarantined=NUM_LENT, tickets=1, counters=1)
    is_over = state is being_compared  # it has written everything already
    assert world.at_decoder == (NOTHING if is_over else waiting)
    world.pass_time(40.0 - BOUND_S)
    assert world.at_decoder == (waiting if revocation == "when let go" and not is_over else NOTHING)
    world.prefiller.hung = False
    world.network.wake(world.prefiller.fabric)
    world.pass_time(BOUND_S)
    assert world.at_decoder == NOTHING
    world.settle_a_running_step()
    world.pass_time(BOUND_S)
    assert world.at_prefiller == NOTHING
    world.decoder.pool.look()
    serves_again(world)


def serves_again(world: World) -> None:
    world.pass_time(5.0)  # a Hello is repeated every four seconds at least
    again = world.decoder.reserve("again", tuple(range(LENGTH)))
    lease = world.prefiller.lease("again", LENGTH)
    assert again is not None and lease is not None
    assert world.decoder.open(again, world.peer, lease) is not None
    run_prompts(world.prefiller, world.decoder)
    assert isinstance(again.answers[0], Ready) and not world.decoder.wrong_bytes(again)


def test_a_step_of_thirty_seconds_costs_no_ticket_and_no_lease() -> None:
    """Neither the prompt that it computes, nor one that comes meanwhile: messages are answered all the same."""
    world = World()
    request = world.open(remaining_s=60.0)
    in_a_step(world)
    meanwhile = world.decoder.reserve("meanwhile", tuple(range(9)))
    lease = world.prefiller.lease("meanwhile", 9)
    assert meanwhile is not None and lease is not None
    world.pass_time(1.9)  # of the two seconds that a lease waits for its Prefill
    assert world.decoder.open(meanwhile, world.peer, lease, remaining_s=60.0) is not None
    world.pass_time(28.1)
    assert (request.answers, meanwhile.answers) == ([], [])
    assert world.at_prefiller.tickets == 2
    world.settle_a_running_step()
    run_prompts(world.prefiller, world.decoder)
    for each in (request, meanwhile):
        assert isinstance(each.answers[0], Ready) and not world.decoder.wrong_bytes(each)
