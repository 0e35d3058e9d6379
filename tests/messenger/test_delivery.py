"""Every byte of every page arrives, and nothing else is touched: whole tickets over every kind of fabric."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import pytest
from kv_world import (
    KV,
    NATIVE_TRANSPORTS,
    DecoderProcess,
    LoopbackSite,
    NativeSite,
    PrefillerProcess,
    Site,
    greet,
    pair,
    run_prompts,
)

from headrace.fabric.native import Transport
from headrace.messenger.entries import DecoderOptions
from headrace.messenger.jobs import Transfer
from headrace.messenger.outcomes import Ready, TicketFailed
from headrace.testing import Faults

PAGE, CHUNK = KV.page_size, 8
LENGTHS = [1, 2, PAGE - 1, PAGE, PAGE + 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 1, 50]

SEEDS = range(3)
CALM = Faults()
EVERY_DAY = Faults(
    delay_s=(0.0, 0.01),
    late_s=(0.0, 0.1),  # below what counts as lost
    reorder=True,
    early_completion=0.3,
    late_completion=0.2,
    late_write=0.1,
    split_write=0.3,
    late_imm=0.3,
    duplicate_completion=0.2,
    full_queue=0.1,
    duplicate_message=0.1,
    reorder_messages=True,
)


def tokens(num: int, *, seed: int = 1) -> tuple[int, ...]:
    return tuple((seed * 1000 + 7 * i) % 997 for i in range(num))


def serve(
    decoder: DecoderProcess,
    prefiller: PrefillerProcess,
    peer: int,
    name: str,
    prompt: tuple[int, ...],
    *,
    group: int = 0,
) -> Ready:
    """One request from reservation to finish; its bytes are compared."""
    request = decoder.reserve(name, prompt, group)
    assert request is not None
    if not decoder.needs_prefill(request):
        assert decoder.wrong_bytes(request) == []
        decoder.finish(request)
        cached_len = request.reservation.cached_len
        return Ready(request_id=name, imm=0, cached_len=cached_len, landed_at=0.0)  # type: ignore[arg-type]
    opened_at, lease = prefiller.site.now, prefiller.lease(name, len(prompt))
    assert lease is not None
    assert decoder.open(request, peer, lease) is not None  # type: ignore[arg-type]
    before = decoder.memory.copy()
    prefiller.site.wait_for(lambda: bool(prefiller.prompts or request.answers), prefiller, decoder)
    run_prompts(prefiller, decoder)
    prefiller.site.wait_for(lambda: bool(request.answers), prefiller, decoder)
    [answer] = request.answers
    assert isinstance(answer, Ready), answer
    assert opened_at <= answer.landed_at <= prefiller.site.now
    assert decoder.wrong_bytes(request) == []
    assert decoder.written_elsewhere(request, before) == 0
    assert decoder.index_is_sane(request)
    decoder.finish(request)
    return answer


def everything_is_back(prefiller: PrefillerProcess, decoder: DecoderProcess) -> None:
    """No ticket, lease or page is left with anybody, and nothing landed where it should not."""

    def is_idle() -> bool:
        tickets = decoder.messenger.statistics().num_open, prefiller.messenger.statistics().num_tickets
        return tickets == (0, 0)

    prefiller.site.wait_for(is_idle, prefiller, decoder)
    for process in (prefiller, decoder):
        process.messenger.check()
        for pool in process.pools:
            pool.look()
            pages = pool.statistics()
            assert (pages.num_held, pages.num_quarantined) == (0, 0), pages
    assert prefiller.messenger.statistics().num_leased_tokens == 0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where a test's processes live, and when the prefiller's pages travel."""

    transfer: Transfer = "layers"
    seed: int = 0  # of the loopback network
    transport: Transport | None = None  # over this, not over the loopback network
    faults: Faults = CALM


IN_MEMORY = {
    "calm": Setting(),
    "reordered-1": Setting(seed=1, faults=EVERY_DAY),
    "reordered-2": Setting(seed=2, faults=EVERY_DAY),
    "reordered-3": Setting(seed=3, faults=EVERY_DAY),
    "whole-calm": Setting(transfer="whole"),
    "whole-reordered-1": Setting(transfer="whole", seed=1, faults=EVERY_DAY),
    "whole-reordered-2": Setting(transfer="whole", seed=2, faults=EVERY_DAY),
}
NATIVE = {transport: Setting(transport=transport) for transport in NATIVE_TRANSPORTS}
WHOLE_NATIVE = {f"whole-{name}": Setting(transfer="whole", transport=name) for name in NATIVE_TRANSPORTS}
SETTINGS = IN_MEMORY | NATIVE | WHOLE_NATIVE


@pytest.fixture
def site(setting: str) -> Iterator[Site]:
    chosen = SETTINGS[setting]
    if chosen.transport is None:
        yield LoopbackSite(chosen.seed, chosen.faults)
    else:
        real = NativeSite(chosen.transport)
        yield real
        real.close()


@pytest.fixture
def transfer(setting: str) -> Transfer:
    return SETTINGS[setting].transfer


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("length", LENGTHS)
def test_every_byte_of_a_prompt_of_any_length_arrives(length: int, site: Site, transfer: Transfer) -> None:
    prefiller, decoder, peer = pair(site, transfer=transfer)
    serve(decoder, prefiller, peer, "a", tokens(length))
    everything_is_back(prefiller, decoder)


HIT_LENGTHS = [8 * PAGE, 8 * PAGE + 1, 8 * PAGE + 3]
HAS = [0, PAGE, 5 * PAGE, 7 * PAGE + 1, 8 * PAGE]


def prompts_with_hits() -> list[tuple[int, int, int, str]]:
    """All of them in memory. Over the real transports, which take most of the time and know nothing of hits, every two
    of length, decoder's and prefiller's hits meet, but not every three."""
    return [
        (length, decoder_has, prefiller_has, setting)
        for setting in [*IN_MEMORY, *NATIVE]
        for (i, length), (j, decoder_has), (k, prefiller_has) in product(*map(enumerate, (HIT_LENGTHS, HAS, HAS)))
        if setting in IN_MEMORY or i == (j + k) % len(HIT_LENGTHS)
    ]


@pytest.mark.parametrize(("length", "decoder_has", "prefiller_has", "setting"), prompts_with_hits())
def test_hits_on_either_side_are_used_and_never_sent_wrong(
    length: int, decoder_has: int, prefiller_has: int, site: Site, transfer: Transfer
) -> None:
    prefiller, decoder, peer = pair(site, transfer=transfer)
    other = DecoderProcess(site, decoder.model.layout)
    other_peer = greet(other, prefiller)
    prompt = tokens(length)
    if decoder_has:  # through a prefiller of its own, so that only the decoder knows these pages
        helper = PrefillerProcess(site, prefiller.model.layout)
        serve(decoder, helper, greet(decoder, helper), "decoder's", prompt[: decoder_has + 1])
    if prefiller_has:
        serve(other, prefiller, other_peer, "prefiller's", prompt[: prefiller_has + 1])
    answer = serve(decoder, prefiller, peer, "a", prompt)
    most = (length - 1) // PAGE * PAGE
    h, p = min(decoder_has // PAGE * PAGE, most), min(prefiller_has // PAGE * PAGE, most)
    assert answer.cached_len == (h if h == length - 1 else max(h, p))
    everything_is_back(prefiller, decoder)


CORRUPTIONS = {
    "a flipped bit": Faults(flip_bit=1.0),
    "swapped pages": Faults(swap_pages=1.0),
    "missing bytes": Faults(skip_bytes=1.0),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("what", CORRUPTIONS)
def test_wrong_bytes_are_caught_and_never_ready(what: str, seed: int) -> None:
    site = LoopbackSite(seed)
    prefiller, decoder, peer = pair(site)
    request = decoder.reserve("a", tokens(30))
    lease = prefiller.lease("a", 30)
    assert request is not None
    assert lease is not None
    decoder.open(request, peer, lease)
    site.settle(prefiller, decoder)
    site.network.faults = CORRUPTIONS[what]
    prefiller.begin_step()
    prefiller.compute_layer()
    while site.network.step():
        pass  # the first layer of the first chunk goes wrong, nothing else
    site.network.faults = Faults()
    while prefiller.compute_layer():
        pass
    prefiller.end_step()
    run_prompts(prefiller, decoder)
    [answer] = request.answers
    assert isinstance(answer, TicketFailed)
    assert answer.reason == "corrupt"
    decoder.finish(request)
    everything_is_back(prefiller, decoder)
    assert decoder.messenger.statistics().num_wrong_bytes == 1


def test_without_verification_the_header_alone_is_checked() -> None:
    site = LoopbackSite(1)
    prefiller, decoder, peer = pair(site, decoder_options=DecoderOptions(verify_kv=False))
    serve(decoder, prefiller, peer, "a", tokens(30))
    everything_is_back(prefiller, decoder)
