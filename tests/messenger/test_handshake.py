"""The handshake over a network: refused, repeated, lost, late; and nobody who came and went leaves a trace."""

import random
from collections.abc import Iterator
from itertools import pairwise

import msgspec
import pytest
from kv_world import DecoderProcess, LoopbackSite, PrefillerProcess, greet, pair, pool_layout
from puppet import PuppetDecoder, PuppetPrefiller
from test_hello import DIFFERENCES

from headrace.errors import FabricError, InputError
from headrace.fabric.interface import Descriptor, PeerId
from headrace.messenger.decoder import DecoderMessenger
from headrace.messenger.known_decoders import FORGET_REFUSED_S
from headrace.messenger.known_prefillers import FORGET_S, LONGEST_REPEAT_S
from headrace.messenger.outcomes import PeerReady, PeerRefused
from headrace.protocol.messages import PROTOCOL_VERSION, Hello, HelloRefused, encode
from headrace.testing import Faults

LOSSES = Faults(lose_message=1.0)


@pytest.fixture
def site() -> LoopbackSite:
    return LoopbackSite(seed=1)


@pytest.fixture
def prefiller(site: LoopbackSite) -> PrefillerProcess:
    return PrefillerProcess(site, pool_layout(16))


@pytest.fixture
def puppet(site: LoopbackSite, prefiller: PrefillerProcess) -> PuppetDecoder:
    return PuppetDecoder(site, pool_layout(10), prefiller.fabric.address)


def num_peers(process: PrefillerProcess | DecoderProcess) -> int:
    return process.fabric.statistics().num_peers_now


def due_times(decoder: DecoderProcess, until: float) -> Iterator[float]:
    """Moves the clock from one due time to the next."""
    network = decoder.site.network  # type: ignore[attr-defined]
    while (due := decoder.messenger.next_due()) is not None and due <= until:
        network.advance(due - network.now)
        yield due


# ---- refused ---------------------------------------------------------------------------------------------------


def test_a_difference_is_told_to_both_sides_each_with_its_own_values(site: LoopbackSite) -> None:
    prefiller = PrefillerProcess(site, pool_layout(16), fingerprint="one model")
    decoder = DecoderProcess(site, pool_layout(16), fingerprint="another model")
    peer = decoder.messenger.greet(prefiller.fabric.address, site.now)
    site.settle(prefiller, decoder)
    [at_prefiller] = prefiller.refused
    [at_decoder] = decoder.outcomes
    assert isinstance(at_decoder, PeerRefused)
    assert (at_decoder.peer, at_decoder.field, at_prefiller.field) == (peer, "fingerprint", "fingerprint")
    assert "ours another model, theirs one model" in at_decoder.text
    assert "ours 'one model', theirs 'another model'" in at_prefiller.text
    assert not decoder.messenger.is_ready(peer)
    assert prefiller.decoders == {}


@pytest.mark.parametrize("field", DIFFERENCES)
def test_a_prefiller_refuses_every_difference_by_name(
    field: str, site: LoopbackSite, prefiller: PrefillerProcess, puppet: PuppetDecoder
) -> None:
    changes, ours, theirs = DIFFERENCES[field]
    puppet.say(puppet.peer, puppet.hello(**changes))
    site.settle(prefiller)
    [answer] = puppet.heard(HelloRefused)
    assert (answer.field, answer.ours, answer.theirs) == (field, str(ours), str(theirs))
    assert (answer.address, answer.epoch) == (prefiller.fabric.address, puppet.epoch)
    assert [refused.field for refused in prefiller.refused] == [field]
    assert puppet.heard(Hello) == []


def test_a_decoder_whose_hello_is_of_another_form_is_told_the_protocol_that_differs(
    site: LoopbackSite, prefiller: PrefillerProcess, puppet: PuppetDecoder
) -> None:
    said = msgspec.msgpack.decode(encode(puppet.hello(protocol=PROTOCOL_VERSION + 1)))
    said["pool"] = {"as nobody knows": "it yet"}
    puppet.say(puppet.peer, msgspec.msgpack.encode(said))
    site.settle(prefiller)
    [answer] = puppet.heard(HelloRefused)
    assert (answer.field, answer.ours, answer.theirs) == ("protocol", str(PROTOCOL_VERSION), str(PROTOCOL_VERSION + 1))
    assert [refused.field for refused in prefiller.refused] == ["protocol"]
    puppet.say(puppet.peer, msgspec.msgpack.encode({**said, "protocol": PROTOCOL_VERSION}))
    site.settle(prefiller)
    assert prefiller.messenger.statistics().num_strange_messages == 1, "of our own version it is malformed"


@pytest.mark.parametrize("field", sorted(set(DIFFERENCES) - {"role"}))
def test_a_decoder_refuses_every_difference_in_the_answer_and_takes_its_access_away(
    field: str, site: LoopbackSite
) -> None:
    decoder, other = DecoderProcess(site, pool_layout(10)), PuppetPrefiller(site, pool_layout(16))
    peer = decoder.messenger.greet(other.fabric.address, site.now)
    site.settle(decoder)
    asked = other.meet()
    changes, _, _ = DIFFERENCES[field]
    other.say(other.peer, other.hello(asked.epoch, **changes))
    site.settle(decoder)
    [refused] = decoder.outcomes
    assert isinstance(refused, PeerRefused)
    assert (refused.peer, refused.field) == (peer, field)
    decoder.memory[:64] = 7
    transfer = other.fabric.open_transfer(other.peer, 1)  # type: ignore[arg-type]
    other.fabric.submit_write(transfer, src_offset=0, dst_offset=0, length=64)
    site.settle(decoder)
    assert (decoder.memory[:64] == 7).all(), "a refused prefiller wrote"


def test_two_decoders_do_not_shake_hands(site: LoopbackSite) -> None:
    first, second = DecoderProcess(site, pool_layout(8)), DecoderProcess(site, pool_layout(8))
    peer = first.messenger.greet(second.fabric.address, site.now)
    site.settle(first, second)
    assert not first.messenger.is_ready(peer)
    assert second.outcomes == []


@pytest.mark.parametrize("num_bytes", [0, 1, 21, 29, 31, 100])
def test_a_descriptor_of_a_wrong_length_is_refused_saying_what_would_be_right(
    num_bytes: int, site: LoopbackSite, prefiller: PrefillerProcess, puppet: PuppetDecoder
) -> None:
    whole = puppet.hello()
    assert len(whole.descriptor) == 30 < Descriptor.MAX_BYTES
    puppet.say(puppet.peer, puppet.hello(descriptor=(whole.descriptor * 4)[:num_bytes]))
    site.settle(prefiller)
    [answer] = puppet.heard(HelloRefused)
    right = "at least 22 bytes" if num_bytes < 22 else "30 bytes for 1 keys"
    assert (answer.field, answer.theirs) == ("descriptor", f"{num_bytes} bytes")
    assert answer.ours == f"descriptor: must be {right}, is {num_bytes}"


def test_a_descriptor_of_less_memory_than_the_pool_has_is_refused(
    site: LoopbackSite, prefiller: PrefillerProcess, puppet: PuppetDecoder
) -> None:
    short = Descriptor(addressing="offset", base=0, length=puppet.layout.total_bytes - 1, keys=(1,), generation=1)
    puppet.say(puppet.peer, puppet.hello(descriptor=short.encode()))
    site.settle(prefiller)
    [answer] = puppet.heard(HelloRefused)
    assert (answer.field, answer.theirs) == ("descriptor", str(short.length))
    assert str(puppet.layout.total_bytes) in answer.ours


def test_a_descriptor_that_the_fabric_does_not_take_is_refused_and_the_older_epoch_stays(
    site: LoopbackSite, prefiller: PrefillerProcess, puppet: PuppetDecoder
) -> None:
    puppet.greet()
    site.settle(prefiller)
    stale = Descriptor(addressing="offset", base=0, length=puppet.layout.total_bytes, keys=(1,), generation=0)
    puppet.epoch += 1
    puppet.say(puppet.peer, puppet.hello(descriptor=stale.encode()))
    site.settle(prefiller)
    [answer] = puppet.heard(HelloRefused)
    assert (answer.field, answer.epoch) == ("descriptor", 2)
    assert len(puppet.heard(Hello)) == 1
    assert num_peers(prefiller) == 1
    puppet.greet()  # what is right again is taken
    site.settle(prefiller)
    assert [hello.epoch for hello in puppet.heard(Hello)] == [1, 3]


def test_a_known_decoder_that_differs_all_at_once_is_refused_and_stays_as_it_was(
    site: LoopbackSite, prefiller: PrefillerProcess, puppet: PuppetDecoder
) -> None:
    puppet.greet()
    site.settle(prefiller)
    puppet.epoch += 1
    puppet.say(puppet.peer, puppet.hello(fingerprint="another"))
    site.settle(prefiller)
    assert [answer.field for answer in puppet.heard(HelloRefused)] == ["fingerprint"]
    site.network.advance(2 * FORGET_REFUSED_S)
    site.settle(prefiller)
    assert num_peers(prefiller) == 1, "the decoder itself was forgotten"


def test_a_hello_whose_address_is_none_is_dropped_and_counted(
    site: LoopbackSite, prefiller: PrefillerProcess, puppet: PuppetDecoder
) -> None:
    puppet.greet()
    site.settle(prefiller)
    puppet.say(puppet.peer, puppet.hello(sender="f" * 32, address=b""))
    site.settle(prefiller)
    assert prefiller.messenger.statistics().num_strange_messages == 1
    assert num_peers(prefiller) == 1
    assert prefiller.decoders == {puppet.identity.uuid: 1}


@pytest.mark.parametrize("field", ["fingerprint", "layout", "host", "kv_dtype", "address", "descriptor"])
def test_a_hello_with_something_huge_is_dropped_and_counted_and_a_right_one_is_taken(
    field: str, site: LoopbackSite, prefiller: PrefillerProcess, puppet: PuppetDecoder
) -> None:
    huge = b"x" * (8 << 20) if field in ("address", "descriptor") else "x" * (8 << 20)
    puppet.say(puppet.peer, puppet.hello(**{field: huge}))
    site.settle(prefiller)
    assert prefiller.messenger.statistics().num_strange_messages == 1
    assert (num_peers(prefiller), prefiller.refused, puppet.heard(HelloRefused)) == (0, [], [])
    puppet.greet()
    site.settle(prefiller)
    assert list(prefiller.decoders) == [puppet.identity.uuid]


def test_a_long_difference_is_told_as_far_as_a_text_goes(
    site: LoopbackSite, prefiller: PrefillerProcess, puppet: PuppetDecoder
) -> None:
    theirs = "\U0001f600" * 256  # of four bytes each
    puppet.say(puppet.peer, puppet.hello(fingerprint=theirs))
    site.settle(prefiller)
    [answer] = puppet.heard(HelloRefused)
    assert (answer.ours, answer.theirs) == ("model", theirs)


def test_a_decoder_needs_a_pool_for_each_data_parallel_group(site: LoopbackSite) -> None:
    made = DecoderProcess(site, pool_layout(4))
    with pytest.raises(InputError, match="pools: must be one for each of 1 groups, are 2"):
        DecoderMessenger(
            fabric=made.fabric,
            identity=made.identity,
            pools=[made.pool, made.pool],
            memory=made.memory,
            rng=random.Random(1),
        )


def test_a_refused_decoder_is_answered_again_but_told_to_the_role_once_and_forgotten_after_a_while(
    site: LoopbackSite, prefiller: PrefillerProcess, puppet: PuppetDecoder
) -> None:
    wrong = encode(puppet.hello(fingerprint="another"))
    for _ in range(3):
        puppet.say(puppet.peer, wrong)
        site.settle(prefiller)
    assert len(puppet.heard(HelloRefused)) == 3
    assert len(prefiller.refused) == 1
    assert num_peers(prefiller) == 1
    due = prefiller.messenger.next_due()
    assert due == site.now + FORGET_REFUSED_S
    site.network.advance(FORGET_REFUSED_S)
    site.settle(prefiller)
    assert num_peers(prefiller) == 0
    assert prefiller.messenger.next_due() is None


def test_a_refused_decoder_that_comes_back_right_is_taken_and_not_forgotten_later(
    site: LoopbackSite, prefiller: PrefillerProcess, puppet: PuppetDecoder
) -> None:
    puppet.say(puppet.peer, puppet.hello(fingerprint="another"))
    site.settle(prefiller)
    puppet.greet()
    site.settle(prefiller)
    assert [hello.epoch for hello in puppet.heard(Hello)] == [1]
    site.network.advance(2 * FORGET_REFUSED_S)
    site.settle(prefiller)
    assert num_peers(prefiller) == 1


# ---- repeated, older, lost -------------------------------------------------------------------------------------


def test_a_repeated_hello_is_answered_again_and_changes_nothing(
    site: LoopbackSite, prefiller: PrefillerProcess, puppet: PuppetDecoder
) -> None:
    puppet.epoch = 1
    hello = encode(puppet.hello())
    for _ in range(3):
        puppet.say(puppet.peer, hello)
        site.settle(prefiller)
    answers = puppet.heard(Hello)
    assert [answer.epoch for answer in answers] == [1, 1, 1]
    assert all(answer.descriptor == b"" for answer in answers), "nobody writes into a prefiller"
    assert num_peers(prefiller) == 1


def test_an_older_epoch_is_not_answered(site: LoopbackSite, prefiller: PrefillerProcess, puppet: PuppetDecoder) -> None:
    puppet.epoch = 1
    old = encode(puppet.hello())
    puppet.epoch = 2
    puppet.say(puppet.peer, puppet.hello())
    puppet.say(puppet.peer, old)
    site.settle(prefiller)
    assert [answer.epoch for answer in puppet.heard(Hello)] == [2]


def test_an_answer_to_an_older_epoch_does_not_make_ready(site: LoopbackSite) -> None:
    decoder, other = DecoderProcess(site, pool_layout(10)), PuppetPrefiller(site, pool_layout(16))
    peer = decoder.messenger.greet(other.fabric.address, site.now)
    site.settle(decoder)
    other.answer()
    site.settle(decoder)
    assert decoder.messenger.is_ready(peer)
    decoder.messenger.peer_hung(peer, site.now)
    other.say(other.peer, other.hello(1))
    site.settle(decoder)
    assert not decoder.messenger.is_ready(peer)
    other.answer()
    site.settle(decoder)
    assert decoder.messenger.is_ready(peer)
    assert [hello.epoch for hello in other.heard(Hello)] == [1, 2]


def test_a_prefiller_that_was_refused_is_asked_again_under_the_next_epoch_when_it_is_greeted_again(
    site: LoopbackSite,
) -> None:
    decoder, other = DecoderProcess(site, pool_layout(10)), PuppetPrefiller(site, pool_layout(16))
    peer = decoder.messenger.greet(other.fabric.address, site.now)
    site.settle(decoder)
    asked = other.meet()
    other.say(other.peer, other.hello(asked.epoch, fingerprint="another"))
    site.settle(decoder)
    assert [type(outcome) for outcome in decoder.outcomes] == [PeerRefused]
    assert decoder.messenger.next_due() == FORGET_S, "it asks on though it was told to"
    assert decoder.messenger.greet(other.fabric.address, site.now) == peer
    site.settle(decoder)
    assert [hello.epoch for hello in other.heard(Hello)] == [1, 2]
    other.answer()
    site.settle(decoder)
    assert decoder.messenger.is_ready(peer)
    assert num_peers(decoder) == 1


def test_greeting_twice_is_greeting_once(site: LoopbackSite, prefiller: PrefillerProcess) -> None:
    decoder = DecoderProcess(site, pool_layout(10))
    peer = greet(decoder, prefiller)
    assert greet(decoder, prefiller) == peer
    assert len([o for o in decoder.outcomes if isinstance(o, PeerReady)]) == 1
    assert num_peers(decoder) == 1


def test_a_hello_is_repeated_until_it_is_answered_ever_more_seldom_but_never_later_than_the_bound(
    site: LoopbackSite, prefiller: PrefillerProcess
) -> None:
    site.network.faults = LOSSES
    decoder = DecoderProcess(site, pool_layout(10))
    peer = decoder.messenger.greet(prefiller.fabric.address, site.now)
    times = [site.now]
    for due in due_times(decoder, until=200.0):
        site.settle(prefiller, decoder)
        times.append(due)
        if len(times) == 12:
            site.network.faults = Faults()
    gaps = [after - before for before, after in pairwise(times)]
    assert gaps[:4] == [0.25, 0.5, 1.0, 2.0]
    assert gaps == sorted(gaps)
    assert max(gaps) == LONGEST_REPEAT_S
    assert decoder.messenger.is_ready(peer)
    assert len(times) == 13, "answered at the first Hello that arrived, and not repeated any more"
    assert decoder.messenger.next_due() is None


@pytest.mark.parametrize("seed", range(5))
def test_a_handshake_survives_most_messages_lost_doubled_and_out_of_order(seed: int) -> None:
    faults = Faults(lose_message=0.7, duplicate_message=0.3, reorder_messages=True, delay_s=(0.0, 3.0), reorder=True)
    site = LoopbackSite(seed, faults)
    prefiller, decoder = PrefillerProcess(site, pool_layout(16)), DecoderProcess(site, pool_layout(10))
    peer = decoder.messenger.greet(prefiller.fabric.address, site.now)
    for _ in due_times(decoder, until=3600.0):
        site.settle(prefiller, decoder)
    assert decoder.messenger.is_ready(peer)
    assert [type(outcome) for outcome in decoder.outcomes] == [PeerReady]
    assert list(prefiller.decoders) == [decoder.identity.uuid]


# ---- granted ---------------------------------------------------------------------------------------------------


class Refusing:
    """A fabric's `grant` that fails as often as it is told to."""

    def __init__(self, process: DecoderProcess, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_failures = 1
        self._grant = process.fabric.grant
        monkeypatch.setattr(process.fabric, "grant", self.grant)

    def grant(self, peer: PeerId) -> Descriptor:
        if self.num_failures:
            self.num_failures -= 1
            raise FabricError("fi_mr_regattr", 12, "Cannot allocate memory")
        return self._grant(peer)


def test_a_prefiller_that_cannot_be_granted_access_is_told_and_greeted_when_that_is_asked_for_again(
    site: LoopbackSite, prefiller: PrefillerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = DecoderProcess(site, pool_layout(10))
    Refusing(decoder, monkeypatch)
    with pytest.raises(FabricError, match="Cannot allocate memory"):
        decoder.messenger.greet(prefiller.fabric.address, site.now)
    assert decoder.messenger.next_due() is None, "it waits for the answer to a Hello that was not said"
    site.settle(prefiller, decoder)
    assert (prefiller.decoders, decoder.outcomes) == ({}, [])
    peer = greet(decoder, prefiller)
    assert decoder.messenger.is_ready(peer)
    assert num_peers(decoder) == 1


def test_a_prefiller_that_was_refused_and_then_cannot_be_granted_access_is_not_asked_with_an_old_hello(
    site: LoopbackSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, other = DecoderProcess(site, pool_layout(10)), PuppetPrefiller(site, pool_layout(16))
    peer = decoder.messenger.greet(other.fabric.address, site.now)
    site.settle(decoder)
    asked = other.meet()
    other.say(other.peer, other.hello(asked.epoch, fingerprint="another"))
    site.settle(decoder)
    Refusing(decoder, monkeypatch)
    with pytest.raises(FabricError):
        decoder.messenger.greet(other.fabric.address, site.now)
    assert decoder.messenger.next_due() == FORGET_S
    other.say(other.peer, other.hello(2))  # though it was not asked
    site.settle(decoder)
    assert not decoder.messenger.is_ready(peer)
    assert decoder.messenger.greet(other.fabric.address, site.now) == peer
    site.settle(decoder)
    assert [hello.epoch for hello in other.heard(Hello)] == [1, 3]
    other.answer()
    site.settle(decoder)
    assert decoder.messenger.is_ready(peer)


def test_a_prefiller_that_cannot_be_granted_access_anew_after_its_revoke_gets_no_ticket(
    site: LoopbackSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefiller, decoder, peer = pair(site)
    Refusing(decoder, monkeypatch)
    with pytest.raises(FabricError):
        decoder.messenger.peer_hung(peer, site.now)
    assert not decoder.messenger.is_ready(peer)
    assert decoder.messenger.next_due() is None
    assert greet(decoder, prefiller) == peer
    assert [type(outcome) for outcome in decoder.outcomes] == [PeerReady, PeerReady]


# ---- nobody leaves a trace -------------------------------------------------------------------------------------


def test_a_thousand_decoders_that_come_and_go_leave_nothing_at_a_prefiller() -> None:
    site = LoopbackSite(2)
    prefiller = PrefillerProcess(site, pool_layout(8))
    for _ in range(1000):
        decoder = PuppetDecoder(site, pool_layout(2), prefiller.fabric.address)
        decoder.greet()
        while site.network.step():
            prefiller.turn()
        peer = prefiller.decoders.pop(decoder.identity.uuid)
        prefiller.messenger.peer_exited(peer, site.now)
        prefiller.messenger.peer_exited(peer, site.now)
        site.network.kill(decoder.fabric)
    assert num_peers(prefiller) == 0
    assert prefiller.messenger.next_due() is None


def test_a_thousand_prefillers_that_come_and_go_leave_nothing_at_a_decoder() -> None:
    site = LoopbackSite(3)
    decoder = DecoderProcess(site, pool_layout(8))
    for _ in range(1000):
        prefiller = PuppetPrefiller(site, pool_layout(2))
        peer = decoder.messenger.greet(prefiller.fabric.address, site.now)
        while site.network.step():
            decoder.turn()
        prefiller.answer()
        while site.network.step():
            decoder.turn()
        assert decoder.messenger.is_ready(peer)
        decoder.messenger.peer_exited(peer, site.now)
        decoder.messenger.peer_exited(peer, site.now)
        site.network.kill(prefiller.fabric)
    assert num_peers(decoder) == 0
    assert decoder.messenger.next_due() is None


def test_a_prefiller_that_exits_before_it_answers_is_greeted_no_more(site: LoopbackSite) -> None:
    prefiller, decoder, peer = pair(site)
    other = PuppetPrefiller(site, pool_layout(2))
    silent = decoder.messenger.greet(other.fabric.address, site.now)
    decoder.messenger.peer_exited(silent, site.now)
    assert decoder.messenger.next_due() is None
    assert num_peers(decoder) == 1
    assert decoder.messenger.is_ready(peer)
    assert prefiller.runs
