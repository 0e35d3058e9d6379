"""Epochs and processes that follow one another: another pool under the next epoch, another process at the address."""

from collections.abc import Iterator

import numpy as np
import pytest
from fixed_port import fixed_port
from kv_world import (
    NATIVE_TRANSPORTS,
    DecoderProcess,
    LoopbackSite,
    NativeSite,
    PrefillerProcess,
    Process,
    Site,
    greet,
    pair,
    pool_layout,
    run_prompts,
)
from pattern_model import PatternModel, prefix_keys
from prefiller_pair import LATE, Pair
from puppet import PuppetDecoder, PuppetPrefiller

from headrace.fabric.interface import Fabric, PeerId
from headrace.fabric.native import NativeFabric, Transport
from headrace.kvcache.layout import PoolLayout
from headrace.kvcache.memory import PoolMemory
from headrace.messenger.aux import AuxHeader
from headrace.messenger.outcomes import PeerReady, Ready, TicketFailed
from headrace.protocol.messages import Hello, HelloRefused, Refused, TicketClosed, encode
from headrace.testing import LoopbackFabric

PROMPT = tuple(range(100, 114))


@pytest.fixture
def site() -> LoopbackSite:
    return LoopbackSite(seed=1)


def take_over(site: LoopbackSite, address: bytes, fabric: Fabric, *, watched_at: bytes = b"") -> None:
    """The endpoint is found where this address leads from now on, as one bound to the port of an earlier one would be.
    Where it is watched may be somewhere else."""
    assert isinstance(fabric, LoopbackFabric)
    fabric._address = address + watched_at
    site.network._endpoints[address] = site.network._endpoints[fabric._address] = fabric


def uuids_that_were_ready(decoder: DecoderProcess) -> list[str]:
    return [outcome.uuid for outcome in decoder.outcomes if isinstance(outcome, PeerReady)]


def fetch(prefiller: PrefillerProcess, decoder: DecoderProcess, peer: PeerId, name: str) -> None:
    """A ticket is served, and its bytes are right."""
    request, lease = decoder.reserve(name, PROMPT), prefiller.lease(name, len(PROMPT))
    assert request is not None and lease is not None
    assert decoder.open(request, peer, lease) is not None
    prefiller.site.wait_for(lambda: bool(prefiller.prompts), prefiller, decoder)
    run_prompts(prefiller, decoder)
    prefiller.site.wait_for(lambda: bool(request.answers), prefiller, decoder)
    assert isinstance(request.answers[0], Ready)
    assert decoder.wrong_bytes(request) == []
    decoder.finish(request)
    prefiller.site.wait_for(lambda: prefiller.messenger.statistics().num_tickets == 0, prefiller, decoder)


# ---- another pool under the next epoch -------------------------------------------------------------------------


def test_a_newer_epoch_may_come_with_another_pool_and_then_its_bounds_and_places_hold() -> None:
    pair = Pair()
    pair.decoder.epoch += 1
    pair.decoder.say(pair.decoder.peer, pair.decoder.hello(pool_num_pages=3))
    pair.deliver()
    beyond = pair.ask(tuple(range(9)), pages=(0, 3))
    assert [(told.ticket, told.reason) for told in pair.decoder.heard(Refused)] == [(beyond.ticket, "malformed")]
    pair.decoder.greet()  # with the whole of it
    pair.deliver()
    served = pair.ask(tuple(range(9)), request_id="b", pages=(98, 99))
    pair.compute_everything()
    pair.settle()
    assert [closed.ticket for closed in pair.decoder.heard(TicketClosed)] == [served.ticket]
    layout, memory = pair.decoder.layout, pair.decoder.memory
    assert PatternModel(layout).differences(memory, prefix_keys(tuple(range(8))), (98, 99), 0) == []
    begin = layout.aux_offset(served.aux_slot)
    assert AuxHeader.unpack(memory[begin : begin + layout.aux_slot_bytes]).ticket == served.ticket


# ---- another decoder at the address ----------------------------------------------------------------------------


@pytest.mark.parametrize("watched_at", [b"", b"elsewhere"])
def test_a_decoder_started_anew_at_its_address_replaces_the_one_before_and_is_served(watched_at: bytes) -> None:
    pair = Pair()
    pair.site.network.faults = LATE
    for i in range(2):  # one has been sent and not taken, one waits for its step
        pair.ask(tuple(range(20 * i, 20 * i + 14)), request_id=f"r{i}")
        if i == 0:
            pair.compute_everything()
    assert pair.prefiller.messenger.statistics().num_tickets == 2
    old = pair.decoder
    pair.site.network.kill(old.fabric)
    new = PuppetDecoder(pair.site, pool_layout(60), pair.prefiller.fabric.address)
    take_over(pair.site, old.fabric.address, new.fabric, watched_at=watched_at)
    pair.decoder = new
    new.greet()
    pair.deliver()
    assert (pair.num_held, pair.prefiller.prompts) == (0, {}), "source pages wait for a process that is gone"
    assert pair.prefiller.fabric.statistics().num_peers_now == 1
    pair.prefiller.messenger.peer_exited(pair.prefiller.decoders[old.identity.uuid], pair.site.now)  # told late
    message = pair.ask(request_id="new")
    pair.compute_everything()
    pair.settle()
    assert [closed.ticket for closed in new.heard(TicketClosed)] == [message.ticket]
    assert pair.prefiller.messenger.statistics().num_strange_messages == 0
    new.say(new.peer, old.prefill(PROMPT, "1"))
    pair.deliver()
    assert pair.prefiller.messenger.statistics().num_strange_messages == 1, "the one before is known still"
    pair.site.network.advance(10.0)
    pair.settle()
    pair.everything_is_back()


def test_the_pages_of_a_running_step_outlive_the_decoder_that_was_replaced_until_the_step_ends() -> None:
    pair = Pair()
    pair.ask()
    pair.step(1, end=False)
    old, pair.decoder = pair.decoder, PuppetDecoder(pair.site, pool_layout(60), pair.prefiller.fabric.address)
    pair.site.network.kill(old.fabric)
    take_over(pair.site, old.fabric.address, pair.decoder.fabric)
    pair.decoder.greet()
    pair.deliver()
    assert pair.num_held > 0
    pair.compute_everything()
    pair.settle()
    pair.everything_is_back()


def test_a_decoder_started_anew_with_another_model_is_refused_and_the_one_before_is_gone_all_the_same() -> None:
    pair = Pair()
    pair.ask()
    old, pair.decoder = pair.decoder, PuppetDecoder(pair.site, pool_layout(60), pair.prefiller.fabric.address)
    pair.site.network.kill(old.fabric)
    take_over(pair.site, old.fabric.address, pair.decoder.fabric)
    pair.decoder.say(pair.decoder.peer, pair.decoder.hello(fingerprint="another"))
    pair.deliver()
    assert [answer.field for answer in pair.decoder.heard(HelloRefused)] == ["fingerprint"]
    assert (pair.num_held, pair.prefiller.prompts) == (0, {})
    pair.settle()
    pair.everything_is_back()


def test_a_refused_decoder_is_refused_again_at_another_start_and_served_when_it_is_right() -> None:
    pair = Pair()
    for fingerprint in ("another", "a third", ""):
        old, pair.decoder = pair.decoder, PuppetDecoder(pair.site, pool_layout(60), pair.prefiller.fabric.address)
        pair.site.network.kill(old.fabric)
        take_over(pair.site, old.fabric.address[:17], pair.decoder.fabric, watched_at=fingerprint.encode())
        told = {"fingerprint": fingerprint} if fingerprint else {}
        pair.decoder.say(pair.decoder.peer, pair.decoder.hello(**told))
        pair.deliver()
        assert len(pair.decoder.heard(HelloRefused if told else Hello)) == 1
    assert pair.prefiller.messenger.statistics().num_strange_messages == 0
    assert pair.prefiller.fabric.statistics().num_peers_now == 1


def test_a_hello_of_the_one_before_that_comes_late_does_not_displace_the_decoder_at_its_address() -> None:
    pair = Pair()
    pair.decoder.epoch += 1
    late = encode(pair.decoder.hello(started=7))
    old, pair.decoder = pair.decoder, PuppetDecoder(pair.site, pool_layout(60), pair.prefiller.fabric.address)
    pair.site.network.kill(old.fabric)
    take_over(pair.site, old.fabric.address, pair.decoder.fabric)
    pair.decoder.epoch = 1
    pair.decoder.say(pair.decoder.peer, pair.decoder.hello(started=8))
    pair.deliver()
    message = pair.ask(request_id="new")
    pair.step()
    pair.decoder.say(pair.decoder.peer, late)
    pair.deliver()
    assert pair.prefiller.messenger.statistics().num_strange_messages == 1
    pair.compute_everything()
    pair.settle()
    assert [closed.ticket for closed in pair.decoder.heard(TicketClosed)] == [message.ticket]
    assert pair.prefiller.fabric.statistics().num_peers_now == 1
    pair.everything_is_back()


def test_a_decoder_after_a_reboot_replaces_the_one_before_though_its_ticks_begin_anew() -> None:
    pair = Pair()
    for host, started in (("one boot", 7), ("the next boot", 3)):
        old, pair.decoder = pair.decoder, PuppetDecoder(pair.site, pool_layout(60), pair.prefiller.fabric.address)
        pair.site.network.kill(old.fabric)
        take_over(pair.site, old.fabric.address, pair.decoder.fabric, watched_at=host.encode())
        pair.decoder.epoch = 1
        pair.decoder.say(pair.decoder.peer, pair.decoder.hello(host=host, started=started))
        pair.deliver()
        assert len(pair.decoder.heard(Hello)) == 1
    assert pair.prefiller.messenger.statistics().num_strange_messages == 0
    assert pair.prefiller.fabric.statistics().num_peers_now == 1


# ---- another prefiller at the address --------------------------------------------------------------------------


def test_a_prefiller_started_anew_at_its_address_is_adopted_by_the_decoder_that_still_greets_it(
    site: LoopbackSite,
) -> None:
    old, decoder, peer = pair(site)
    request, lease = decoder.reserve("lost", PROMPT), old.lease("lost", len(PROMPT))
    assert request is not None and lease is not None
    decoder.open(request, peer, lease)
    site.settle(old, decoder)
    old.begin_step()
    old.compute_layer()
    site.network.kill(old.fabric)
    old.dead = True
    decoder.messenger.peer_hung(peer, site.now)
    site.settle(decoder)
    [answer] = request.answers
    assert isinstance(answer, TicketFailed) and answer.reason == "peer_lost"
    decoder.finish(request)
    new = PrefillerProcess(site, pool_layout(40))
    take_over(site, old.fabric.address, new.fabric)
    while not decoder.messenger.is_ready(peer):
        due = decoder.messenger.next_due()
        assert due is not None, "it is greeted no more"
        site.network.advance(max(0.0, due - site.now))
        site.settle(new, decoder)
    assert uuids_that_were_ready(decoder) == [old.identity.uuid, new.identity.uuid]
    fetch(new, decoder, peer, "again")
    decoder.pool.look()
    assert decoder.fabric.statistics().num_peers_now == 1


def test_a_prefiller_watched_elsewhere_replaces_the_one_that_was_at_its_port(site: LoopbackSite) -> None:
    old, decoder, peer = pair(site)
    request, lease = decoder.reserve("lost", PROMPT), old.lease("lost", len(PROMPT))
    assert request is not None and lease is not None
    decoder.open(request, peer, lease)
    site.settle(old, decoder)
    site.network.kill(old.fabric)
    old.dead = True
    new = PrefillerProcess(site, pool_layout(40))
    take_over(site, old.fabric.address, new.fabric, watched_at=b"elsewhere")
    there = greet(decoder, new)
    assert there != peer and not decoder.messenger.knows(peer)
    [answer] = request.answers
    assert isinstance(answer, TicketFailed) and answer.reason == "peer_lost"
    decoder.finish(request)
    fetch(new, decoder, there, "again")
    decoder.pool.look()
    assert decoder.fabric.statistics().num_peers_now == 1


def test_another_prefiller_at_the_address_of_one_that_is_ready_is_not_believed(site: LoopbackSite) -> None:
    decoder, other = DecoderProcess(site, pool_layout(20)), PuppetPrefiller(site, pool_layout(16))
    peer = decoder.messenger.greet(other.fabric.address, site.now)
    site.settle(decoder)
    other.answer()
    site.settle(decoder)
    for epoch in (1, 2):
        other.say(other.peer, other.hello(epoch, sender="f" * 32))
    site.settle(decoder)
    assert uuids_that_were_ready(decoder) == [other.identity.uuid]
    assert decoder.messenger.is_ready(peer)


def test_another_prefiller_that_answers_for_an_older_epoch_is_not_believed(site: LoopbackSite) -> None:
    decoder, other = DecoderProcess(site, pool_layout(20)), PuppetPrefiller(site, pool_layout(16))
    peer = decoder.messenger.greet(other.fabric.address, site.now)
    site.settle(decoder)
    other.answer()
    site.settle(decoder)
    decoder.messenger.peer_hung(peer, site.now)
    site.settle(decoder)
    asked = other.meet()
    other.say(other.peer, other.hello(1, sender="f" * 32))
    site.settle(decoder)
    assert not decoder.messenger.is_ready(peer)
    other.say(other.peer, other.hello(asked.epoch, sender="f" * 32))
    site.settle(decoder)
    assert uuids_that_were_ready(decoder) == [other.identity.uuid, "f" * 32]


# ---- over real endpoints at one port ---------------------------------------------------------------------------


class PortSite(NativeSite):
    """A site whose next endpoint is bound to `port`: its address is that of the one before."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self.fixed_port = fixed_port()
        self.port = 0

    def endpoint(self, layout: PoolLayout) -> tuple[Fabric, np.ndarray]:
        memory = PoolMemory(layout.total_bytes)
        fabric = NativeFabric(memory.fd, memory.length, transports=(self.transport,), port=self.port)
        self._fabrics.append(fabric)
        self.memories[fabric.address] = memory
        return fabric, memory.bytes

    def at_fixed_port(self) -> Site:
        self.port = self.fixed_port
        return self

    def at_any_port(self) -> Site:
        self.port = 0
        return self


@pytest.fixture(params=NATIVE_TRANSPORTS)
def ports(request: pytest.FixtureRequest) -> Iterator[PortSite]:
    made = PortSite(request.param)
    yield made
    made.close()


def end(process: Process) -> None:
    process.dead = True
    process.fabric.close()


def test_decoders_that_follow_one_another_at_one_port_are_each_served_by_the_prefiller(ports: PortSite) -> None:
    prefiller = PrefillerProcess(ports.at_any_port(), pool_layout(24))
    addresses = []
    for i in range(3):
        decoder = DecoderProcess(ports.at_fixed_port(), pool_layout(20 + i))
        addresses.append(decoder.fabric.address)
        peer = greet(decoder, prefiller)
        fetch(prefiller, decoder, peer, f"r{i}")
        assert prefiller.fabric.statistics().num_peers_now == 1
        end(decoder)
    assert len(set(addresses)) == 1
    assert prefiller.pool.statistics().num_held == 0
    prefiller.messenger.check()


def test_prefillers_that_follow_one_another_at_one_port_each_serve_the_decoder(ports: PortSite) -> None:
    decoder = DecoderProcess(ports.at_any_port(), pool_layout(20))
    peers = set()
    for i in range(3):
        prefiller = PrefillerProcess(ports.at_fixed_port(), pool_layout(24 + i))
        if i:  # greeted all the while, until somebody is there
            ports.wait_for(lambda: decoder.messenger.is_ready(peer), prefiller, decoder)  # noqa: B023
        else:
            peer = greet(decoder, prefiller)
        peers.add(peer)
        fetch(prefiller, decoder, peer, f"r{i}")
        assert uuids_that_were_ready(decoder)[-1] == prefiller.identity.uuid
        end(prefiller)
        decoder.messenger.peer_hung(peer, ports.now)
    assert len(peers) == 1
    decoder.messenger.check()
    decoder.pool.look()
