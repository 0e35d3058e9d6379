"""Tickets beside each other: none waits for another one's step, pages or peer."""

from kv_world import DecoderProcess, LoopbackSite, PrefillerProcess, Request, greet, pair, pool_layout, run_prompts

from headrace.fabric.interface import PeerId
from headrace.messenger.outcomes import Ready, TicketFailed

PROMPT = tuple(range(100, 113))  # 12 tokens to prefill: three whole pages
OTHER = tuple(range(200, 213))


def asked(
    decoder: DecoderProcess, prefiller: PrefillerProcess, peer: PeerId, name: str, token_ids: tuple[int, ...]
) -> Request:
    request = decoder.reserve(name, token_ids)
    lease = prefiller.lease(name, len(token_ids))
    assert request is not None and lease is not None
    assert decoder.open(request, peer, lease) is not None
    prefiller.site.settle(prefiller, decoder)
    return request


def test_what_has_landed_is_ready_though_an_older_ticket_still_waits_for_its_step() -> None:
    prefiller, decoder, peer = pair(LoopbackSite(1))
    first = DecoderProcess(prefiller.site, pool_layout(16))
    asked(first, prefiller, greet(first, prefiller), "who had it before", PROMPT)
    run_prompts(prefiller, first)
    older = asked(decoder, prefiller, peer, "older", OTHER)
    newer = asked(decoder, prefiller, peer, "newer", PROMPT)  # the prefiller has it all: it needs no step
    assert older.answers == []
    assert isinstance(newer.answers[0], Ready) and not decoder.wrong_bytes(newer)
    run_prompts(prefiller, decoder)
    assert isinstance(older.answers[0], Ready)


def test_full_pools_on_both_sides_wait_for_nobody() -> None:
    """The prefiller's is full of what a decoder that stands still does not take; the other decoder's of a request that
    wants to be prefilled there."""
    site = LoopbackSite(2)
    prefiller = PrefillerProcess(site, pool_layout(4))
    still, decoder = DecoderProcess(site, pool_layout(4)), DecoderProcess(site, pool_layout(4))
    taken = asked(still, prefiller, greet(still, prefiller), "not taken", PROMPT)
    peer = greet(decoder, prefiller)
    site.network.hang(still.fabric)
    still.hung = True
    run_prompts(prefiller, decoder)
    assert prefiller.pool.statistics().num_held == 3

    refused = asked(decoder, prefiller, peer, "refused", OTHER)
    assert decoder.reserve("without room", PROMPT) is None
    [answer] = refused.answers
    assert isinstance(answer, TicketFailed)
    assert answer.refusal in ("no_room", "held_cap")
    assert prefiller.messenger.statistics().num_tickets == 1, "what has no decode pages holds nothing here"
    decoder.finish(refused)
    assert decoder.pool.capacity == 4, "it may be computed here at once"

    site.network.wake(still.fabric)
    still.hung = False
    site.settle(prefiller, still)
    assert isinstance(taken.answers[0], Ready) and not still.wrong_bytes(taken)
    again = asked(decoder, prefiller, peer, "again", OTHER)
    run_prompts(prefiller, decoder)
    assert isinstance(again.answers[0], Ready) and not decoder.wrong_bytes(again)
