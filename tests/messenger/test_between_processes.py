"""Real processes, over each transport: a prefiller that runs a tiny Llama, and the decoder that goes on from its KV."""

import os
import random
import select
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from kv_world import NATIVE_TRANSPORTS, DecoderProcess, NativeSite, Request, Site
from prefiller_process import FINGERPRINT, GIL_HELD_S, Prefiller, llama_layout
from tiny_llama import LLAMA_KV, TinyLlama

from headrace.fabric.interface import PeerId, Reached
from headrace.fabric.native import Transport
from headrace.kvcache.pool import layer_views
from headrace.messenger.entries import DecoderOptions
from headrace.messenger.outcomes import PeerReady, PeerSuspected, Ready, TicketFailed

PAGE, CHUNK = LLAMA_KV.page_size, 16
LENGTHS = [2, PAGE - 1, PAGE, PAGE + 1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK + 3]


@pytest.fixture(scope="module")
def model() -> TinyLlama:
    torch.set_num_threads(1)
    return TinyLlama()


@pytest.fixture(scope="module", params=NATIVE_TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> Transport:
    chosen: Transport = request.param
    return chosen


@pytest.fixture(scope="module")
def prefiller(transport: Transport) -> Iterator[Prefiller]:
    with Prefiller(transport, chunk_tokens=CHUNK) as process:
        yield process


@pytest.fixture(scope="module")
def prefillers(transport: Transport, prefiller: Prefiller) -> Iterator[tuple[Prefiller, Prefiller]]:
    """The one that is asked, and one through which the decoder came to what it has."""
    with Prefiller(transport, chunk_tokens=CHUNK) as helper:
        yield prefiller, helper


@pytest.fixture
def site(transport: Transport, prefillers: tuple[Prefiller, Prefiller]) -> Iterator[NativeSite]:
    made = NativeSite(transport)
    yield made
    made.close()
    # Decoders are processes: one that is gone is forgotten, and its port may be the next one's.
    for each in prefillers:
        each.ask("decoders_exited")


@pytest.fixture
def decoder(site: NativeSite) -> DecoderProcess:
    return make_decoder(site)


def make_decoder(site: Site, *, num_pages: int = 200, patience_s: float = 2.0) -> DecoderProcess:
    options = DecoderOptions(patience_s=patience_s)
    return DecoderProcess(site, llama_layout(num_pages), options=options, fingerprint=FINGERPRINT)


def meet(decoder: DecoderProcess, prefiller: Prefiller) -> PeerId:
    peer = decoder.messenger.greet(prefiller.address, time.monotonic())
    decoder.site.wait_for(lambda: decoder.messenger.is_ready(peer), decoder)
    return peer


def prompt(num_tokens: int, *, seed: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(512), k=num_tokens))


NAMES = iter(range(10**9))


def ask(
    decoder: DecoderProcess, prefiller: Prefiller, peer: PeerId, token_ids: Sequence[int], *, remaining_s: float = 30.0
) -> Request:
    """Open a ticket; nothing is waited for."""
    request = decoder.reserve(f"r{next(NAMES)}", tuple(token_ids))
    assert request is not None, f"{decoder.pool!r}"
    lease = prefiller.ask("lease", request_id=request.request_id, num_tokens=len(token_ids))["lease"]
    assert decoder.open(request, peer, lease, remaining_s=remaining_s) is not None
    return request


def answer_of(decoder: DecoderProcess, request: Request) -> Ready | TicketFailed:
    decoder.site.wait_for(lambda: bool(request.answers), decoder)
    [answer] = request.answers
    return answer


def ready(decoder: DecoderProcess, request: Request) -> Ready:
    answer = answer_of(decoder, request)
    assert isinstance(answer, Ready), answer
    return answer


def first_token(model: TinyLlama, decoder: DecoderProcess, request: Request) -> torch.Tensor:
    """Logits of the first decode query, from the KV that came."""
    memory = decoder.site.memories[decoder.fabric.address]  # type: ignore[attr-defined]
    n = len(request.token_ids)
    views = layer_views(memory, decoder.model.layout)
    return model.forward(request.token_ids[-1:], n - 1, request.reservation.pages, views)


def computed_alone(model: TinyLlama, token_ids: Sequence[int]) -> torch.Tensor:
    """The same logits by one forward pass with nobody else's help."""
    num_pages = -(-len(token_ids) // PAGE)
    shape = (num_pages, LLAMA_KV.num_kv_heads, 2, PAGE, LLAMA_KV.head_dim)
    views = [torch.zeros(shape) for _ in range(LLAMA_KV.num_layers)]
    return model.forward(token_ids, 0, range(num_pages), views)


def check_text(model: TinyLlama, decoder: DecoderProcess, request: Request) -> None:
    torch.testing.assert_close(
        first_token(model, decoder, request), computed_alone(model, request.token_ids), rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("length", LENGTHS)
def test_the_first_token_is_the_one_of_an_undivided_model(
    length: int, model: TinyLlama, prefiller: Prefiller, decoder: DecoderProcess
) -> None:
    peer = meet(decoder, prefiller)
    request = ask(decoder, prefiller, peer, prompt(length, seed=length))
    assert ready(decoder, request).cached_len == 0
    check_text(model, decoder, request)
    decoder.pool.look()  # nothing landed in any page that the request does not hold
    decoder.finish(request)


HITS = [(d, p) for d in (0, PAGE, 3 * PAGE) for p in (0, PAGE, 4 * PAGE)]


@pytest.mark.parametrize("hits", HITS)
@pytest.mark.parametrize("length", [4 * PAGE, 4 * PAGE + 1, 5 * CHUNK])
def test_the_first_token_is_right_with_hits_on_either_side(
    length: int,
    hits: tuple[int, int],
    model: TinyLlama,
    prefillers: tuple[Prefiller, Prefiller],
    decoder: DecoderProcess,
) -> None:
    (decoder_has, prefiller_has), (prefiller, helper) = hits, prefillers
    token_ids = prompt(length, seed=1000 + length + decoder_has * 7 + prefiller_has * 3001)
    if decoder_has:  # from elsewhere, so that the prefiller has none of it
        request = ask(decoder, helper, meet(decoder, helper), token_ids[: decoder_has + 1])
        ready(decoder, request)
        decoder.finish(request)
    if prefiller_has:
        other = make_decoder(decoder.site)
        ready(other, ask(other, prefiller, meet(other, prefiller), token_ids[: prefiller_has + 1]))
        # Here it is ready when the last byte has landed; there it can be hit when the step is committed.
        other.site.wait_for(lambda: prefiller.ask("statistics")["num_tickets"] == 0, other)
    request = ask(decoder, prefiller, meet(decoder, prefiller), token_ids)
    most = (length - 1) // PAGE * PAGE
    assert ready(decoder, request).cached_len == min(max(decoder_has, prefiller_has), most)
    check_text(model, decoder, request)
    decoder.pool.look()


def flip_a_bit(pages: np.ndarray, table: Sequence[int]) -> None:
    pages[2, table[3], 1, 0, 5, 9] ^= 1


def swap_two_pages(pages: np.ndarray, table: Sequence[int]) -> None:
    pages[:, [table[1], table[2]]] = pages[:, [table[2], table[1]]]


def lose_a_layer(pages: np.ndarray, table: Sequence[int]) -> None:
    pages[1, table[4]] = 0xEE


@pytest.mark.parametrize("damage", [flip_a_bit, swap_two_pages, lose_a_layer])
def test_damage_between_the_last_arrival_and_the_first_use_is_caught(
    damage: object, prefiller: Prefiller, decoder: DecoderProcess
) -> None:
    peer = meet(decoder, prefiller)
    request = ask(decoder, prefiller, peer, prompt(60, seed=77))
    events, now = [], time.monotonic()
    while not any(isinstance(event, Reached) for event in events):
        select.select([decoder.fabric.event_fd], [], [], 1.0)
        events += decoder.fabric.drain_events()
    damage(decoder.model.pages(decoder.memory), request.reservation.pages)  # type: ignore[operator]
    decoder.messenger.handle(events, now)
    answer = answer_of(decoder, request)
    assert isinstance(answer, TicketFailed)
    assert answer.reason == "corrupt"


def test_a_step_that_fails_in_the_middle_sends_nothing_that_was_not_computed(
    model: TinyLlama, site: NativeSite, decoder: DecoderProcess
) -> None:
    with Prefiller(site.transport, chunk_tokens=CHUNK) as prefiller:
        peer = meet(decoder, prefiller)
        prefiller.ask("faults", fail_at_layer=2)
        request = ask(decoder, prefiller, peer, prompt(CHUNK + 1, seed=5))
        answer = answer_of(decoder, request)
        assert isinstance(answer, TicketFailed)
        assert answer.reason == "failed"
        assert answer.text.startswith("layer 2")
        site.wait_for(lambda: decoder.messenger.statistics().num_open == 0, decoder)
        # Of layers 0 and 1 at most: what the owner had not posted when the step failed is not posted later either.
        num_posted = prefiller.ask("statistics")["num_writes_posted"]
        assert num_posted <= 2 * (CHUNK // PAGE)
        assert f"({num_posted} of" in answer.text
        prefiller.ask("faults")
        again = ask(decoder, prefiller, peer, request.token_ids)
        ready(decoder, again)
        check_text(model, decoder, again)


def test_whole_nothing_is_sent_of_a_prompt_whose_last_step_fails_and_all_of_it_when_it_does_not(
    model: TinyLlama, site: NativeSite, decoder: DecoderProcess
) -> None:
    with Prefiller(site.transport, chunk_tokens=CHUNK, transfer="whole") as prefiller:
        peer = meet(decoder, prefiller)
        ready(decoder, ask(decoder, prefiller, peer, prompt(5 * CHUNK + 3, seed=6)))
        num_posted = prefiller.ask("statistics")["num_writes_posted"]
        prefiller.ask("faults", fail_at_layer=2)
        token_ids = prompt(5 * CHUNK + 3, seed=6)[: 5 * CHUNK] + prompt(CHUNK, seed=7)  # a hit, and one step
        other = make_decoder(site)
        peer = meet(other, prefiller)
        failed = answer_of(other, ask(other, prefiller, peer, token_ids))
        assert isinstance(failed, TicketFailed)
        assert "(0 of" in failed.text
        assert prefiller.ask("statistics")["num_writes_posted"] == num_posted
        prefiller.ask("faults")
        request = ask(other, prefiller, peer, token_ids)
        assert ready(other, request).cached_len == 5 * CHUNK
        check_text(model, other, request)
        other.pool.look()


@pytest.mark.timing
def test_a_model_thread_that_holds_the_gil_does_not_delay_its_layers_bytes(
    site: NativeSite, decoder: DecoderProcess
) -> None:
    """The prefiller's interpreter stands still for 200 ms after raising the counter for layer 1 of one chunk; the
    bytes of that layer land in the decoder meanwhile. CLOCK_MONOTONIC is one clock for both processes."""
    with Prefiller(site.transport, chunk_tokens=CHUNK) as prefiller:
        peer = meet(decoder, prefiller)
        ready(decoder, ask(decoder, prefiller, peer, prompt(CHUNK + 1, seed=8)))  # everything is warm
        delays = []
        for attempt in range(5):
            prefiller.ask("faults", hold_gil_at_layer=1)
            request = ask(decoder, prefiller, peer, prompt(CHUNK + 1, seed=100 + attempt))
            page = decoder.model.pages(decoder.memory)[1, request.reservation.pages[1]]
            while (page[-1, -1, -1] == 0xEE).all():
                time.sleep(0.0005)
            landed_ns = time.monotonic_ns()
            delays.append((landed_ns - prefiller.ask("raised")["raised_ns"]) / 1e9)
            prefiller.ask("faults")
            decoder.finish_when_answered(request)
        assert sorted(delays)[-2] < 0.01, delays  # one of five may meet a neighbour
        assert max(delays) < GIL_HELD_S / 2, delays


def cpu_ns(pid: int) -> int:
    """Processor time of all threads of a process so far."""
    return sum(int(stat.read_text().split()[0]) for stat in Path(f"/proc/{pid}/task").glob("*/schedstat"))


@pytest.mark.timing
@pytest.mark.parametrize("waiting", [False, True], ids=["idle", "with a ticket open"])
def test_a_process_with_nothing_to_do_uses_under_one_percent_of_a_core(
    waiting: bool, site: NativeSite, decoder: DecoderProcess
) -> None:
    """All threads of a prefiller that has met its decoder: the interpreter's loop, the owner, torch's."""
    with Prefiller(site.transport, chunk_tokens=CHUNK) as prefiller:
        peer = meet(decoder, prefiller)
        ready(decoder, ask(decoder, prefiller, peer, prompt(50)))
        if waiting:  # a step that takes its time: program and list wait for the layer counter
            prefiller.ask("faults", layer_s=30.0)
            ask(decoder, prefiller, peer, prompt(50, seed=9))
        time.sleep(0.5)
        before = cpu_ns(prefiller.process.pid)
        time.sleep(3.0)
        assert cpu_ns(prefiller.process.pid) - before < 0.01 * 3.0e9
        assert prefiller.ask("statistics")["num_tickets"] == int(waiting)


def exits(decoder: DecoderProcess) -> int:
    """The pidfd of the process that said Hello last."""
    hello = [outcome for outcome in decoder.outcomes if isinstance(outcome, PeerReady)][-1]
    pidfd = hello.process.try_open()
    assert pidfd is not None
    return pidfd


def test_a_killed_prefiller_writes_into_nobodys_page(site: NativeSite, decoder: DecoderProcess) -> None:
    for round_number in range(5):
        with Prefiller(site.transport, chunk_tokens=CHUNK) as prefiller:
            peer = meet(decoder, prefiller)
            pidfd = exits(decoder)
            prefiller.ask("faults", layer_s=0.002)
            requests = [ask(decoder, prefiller, peer, prompt(90, seed=10 * round_number + i)) for i in range(4)]
            end = time.monotonic() + 0.01 + 0.03 * round_number
            site.wait_for(lambda end=end: time.monotonic() > end, decoder)
            os.kill(prefiller.process.pid, signal.SIGKILL)
            assert select.select([pidfd], [], [], 5.0)[0], "the exit is told"
            os.close(pidfd)
            decoder.messenger.peer_exited(peer, time.monotonic())
            for request in requests:
                answer = answer_of(decoder, request)
                assert isinstance(answer, Ready) or answer.reason == "peer_lost"
                decoder.finish(request)
            assert_nothing_lands(site, decoder)


def assert_nothing_lands(site: NativeSite, decoder: DecoderProcess, seconds: float = 0.3) -> None:
    """Every page is free or cached, and stays as it is."""
    pages = decoder.pool.statistics()
    assert (pages.num_held, pages.num_quarantined) == (0, 0), pages
    end = time.monotonic() + seconds
    site.wait_for(lambda: time.monotonic() > end, decoder)
    decoder.pool.look()
    decoder.messenger.check()


def test_a_stopped_prefiller_that_wakes_up_writes_into_nobodys_page(
    model: TinyLlama, site: NativeSite, prefiller: Prefiller
) -> None:
    """It is stopped with writes under way, and revoked when its patience is over; its pages are used by another's
    tickets, or by nobody where its access lingers; then it goes on. No byte and no foreign counter moves, and it is a
    healthy peer again afterwards."""
    lingers = site.transport == "mapped"
    decoder = make_decoder(site, num_pages=48, patience_s=0.2)
    with Prefiller(site.transport, chunk_tokens=CHUNK) as sleeper:
        peer, other = meet(decoder, sleeper), meet(decoder, prefiller)
        for round_number in range(4):
            sleeper.ask("faults", layer_s=0.005)
            victim = ask(decoder, sleeper, peer, prompt(120, seed=500 + round_number))
            first_page = decoder.model.pages(decoder.memory)[:, victim.reservation.pages[round_number]]
            site.wait_for(lambda landed=first_page: bool((landed != 0xEE).any()), decoder)
            os.kill(sleeper.process.pid, signal.SIGSTOP)
            try:
                assert not victim.answers, "it is stopped in the middle"
                assert victim.imm is not None
                decoder.messenger.cancel(victim.imm, time.monotonic())
                answer_of(decoder, victim)
                revokes = round_number + 1
                site.wait_for(lambda: decoder.messenger.statistics().num_revokes == revokes, decoder)  # noqa: B023
                statistics = decoder.messenger.statistics()
                assert (statistics.num_open, statistics.num_revoking) == (lingers, lingers)
                assert statistics.num_quarantined_pages == (-(-119 // PAGE) if lingers else 0)
                decoder.finish(victim)
                requests = [
                    ask(decoder, prefiller, other, prompt(100, seed=900 + 10 * round_number + i)) for i in (1, 2)
                ]
                for request in requests:  # into the pages and slots that were the sleeper's, unless it has them still
                    ready(decoder, request)
                before, counts = decoder.memory.copy(), decoder.fabric.statistics()
            finally:
                os.kill(sleeper.process.pid, signal.SIGCONT)
            site.wait_for(lambda: decoder.messenger.is_ready(peer), decoder)
            if lingers:  # it may have gone on in pages that were nobody's, until it was told
                assert decoder.messenger.statistics().num_open == 0
                before, counts = decoder.memory.copy(), decoder.fabric.statistics()
            # Served on the sleeper's own connection, so whatever it had under way has come by then.
            last = ask(decoder, sleeper, peer, prompt(20, seed=700 + round_number))
            ready(decoder, last)
            assert decoder.written_elsewhere(last, before) == 0
            now = decoder.fabric.statistics()
            num_counted = (now.num_arrivals - counts.num_arrivals) - (now.num_surplus - counts.num_surplus)
            assert num_counted == LLAMA_KV.num_layers * 3 + 1, "only its own counter moved"
            for request in (*requests, last):
                check_text(model, decoder, request)
                decoder.finish(request)
            assert_nothing_lands(site, decoder, 0.05)
        sleeper.ask("faults")
        request = ask(decoder, sleeper, peer, prompt(50, seed=3))
        ready(decoder, request)
        check_text(model, decoder, request)


def test_a_decoder_finds_out_by_itself_that_its_prefiller_stands_still(model: TinyLlama, site: NativeSite) -> None:
    """Nobody tells peer_hung and no deadline is near: it is the missing heartbeats."""
    lingers = site.transport == "mapped"
    decoder = make_decoder(site)
    with Prefiller(site.transport, chunk_tokens=CHUNK) as sleeper:
        peer = meet(decoder, sleeper)
        sleeper.ask("faults", layer_s=0.02)
        victim = ask(decoder, sleeper, peer, prompt(120, seed=41), remaining_s=600.0)
        first_page = decoder.model.pages(decoder.memory)[:, victim.reservation.pages[0]]
        site.wait_for(lambda: bool((first_page != 0xEE).any()), decoder)
        os.kill(sleeper.process.pid, signal.SIGSTOP)
        try:
            answer = answer_of(decoder, victim)
            assert isinstance(answer, TicketFailed), answer
            assert (answer.reason, answer.text) == ("peer_lost", "the prefiller does not answer: it is silent")
            statistics = decoder.messenger.statistics()
            assert (statistics.num_revokes, statistics.num_revoking) == (1, lingers)
            assert bool(statistics.num_quarantined_pages) == lingers
            decoder.finish(victim)
        finally:
            os.kill(sleeper.process.pid, signal.SIGCONT)
        site.wait_for(lambda: decoder.messenger.is_ready(peer), decoder)
        sleeper.ask("faults")
        request = ask(decoder, sleeper, peer, prompt(50, seed=42))
        ready(decoder, request)
        check_text(model, decoder, request)
        decoder.finish(request)
        assert_nothing_lands(site, decoder)
        os.kill(sleeper.process.pid, signal.SIGKILL)
        sleeper.process.wait()
        site.wait_for(lambda: not decoder.messenger.is_ready(peer), decoder)
        suspected = [outcome.text for outcome in decoder.outcomes if isinstance(outcome, PeerSuspected)]
        assert len(suspected) == 2
        assert suspected[1].startswith("the prefiller is gone: ")


def test_cancelled_tickets_give_their_pages_back_when_the_last_byte_has_landed(
    site: NativeSite, prefiller: Prefiller, decoder: DecoderProcess
) -> None:
    peer = meet(decoder, prefiller)
    prefiller.ask("faults", layer_s=0.001)
    rng = random.Random(4)
    for round_number in range(25):
        request = ask(decoder, prefiller, peer, prompt(100, seed=2000 + round_number))
        end = time.monotonic() + rng.random() * 0.05
        site.wait_for(lambda end=end: time.monotonic() > end, decoder)
        assert request.imm is not None
        decoder.messenger.cancel(request.imm, time.monotonic())
        answer_of(decoder, request)
        decoder.finish(request)
    site.wait_for(lambda: decoder.messenger.statistics().num_open == 0, decoder)
    prefiller.ask("faults")
    assert_nothing_lands(site, decoder)
    statistics = decoder.messenger.statistics()
    assert statistics.num_revokes == 0, "a cancel of a healthy prefiller never needs a revoke"
    assert statistics.num_failed.get("cancelled", 0) >= 10
