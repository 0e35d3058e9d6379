"""A request is seen in a state when its gateway says so, and not a moment longer or earlier."""

import pytest
from answering_gateway import deployment as standing
from answering_gateway import instance

from headrace.cli.chaos.states import DECODING_TOKENS, WAITS_S, Search, State
from headrace.protocol.operator import Deployment, RequestFacts, Stage

LENGTH, DECODER_PID = 700, 7
PREFILLER, DECODER = instance(1, "prefiller", "prefiller-0"), instance(2, "decoder", "decoder-0", pid=DECODER_PID)


def deployment(stage: Stage | None, *, num_tokens: int = 0, prefiller: str | None = PREFILLER.uuid) -> Deployment:
    request = RequestFacts(
        request_id="cmpl-1-0",
        tier="interactive",
        stage=stage or "waiting",
        decoder=DECODER.uuid,
        prefiller=prefiller,
        num_prompt_tokens=LENGTH,
        num_tokens=num_tokens,
    )
    return standing(PREFILLER, DECODER, requests=() if stage is None else (request,))


def sees(state: State, *looks: Deployment, landed: bool = False) -> bool:
    """At the last of them, a tenth of a second apart."""
    search = Search(state, {LENGTH}, lambda decoder: landed and decoder.pid == DECODER_PID)
    found = [search.found_in(look, now=2 * WAITS_S * number) for number, look in enumerate(looks)]
    return found[-1] is not None


def test_a_request_waits_when_it_has_waited_for_a_while() -> None:
    assert not sees("waiting", deployment("waiting"))
    assert sees("waiting", deployment("waiting"), deployment("waiting"))
    assert not sees("waiting", deployment("waiting"), deployment("offered"))


def test_it_is_transferred_when_something_has_landed_and_not_all_is_computed() -> None:
    under_way, computed = deployment("prefilling"), deployment("transferring")
    assert sees("prefilling", under_way) and not sees("transferring", under_way)
    assert sees("transferring", under_way, landed=True) and not sees("transferring", computed, landed=True)


def test_a_prompt_that_its_decoder_computes_is_in_no_transfer() -> None:
    here = deployment("prefilling", prefiller=None)
    assert not sees("prefilling", here) and not sees("transferring", here, landed=True)
    assert not sees("starting", deployment("transferring", prefiller=None))


def test_it_starts_when_all_is_computed_and_decodes_after_some_tokens() -> None:
    assert sees("starting", deployment("transferring"))
    assert not sees("decoding", deployment("decoding", num_tokens=DECODING_TOKENS - 1))
    assert sees("decoding", deployment("decoding", num_tokens=DECODING_TOKENS))


@pytest.mark.parametrize("lengths", [{LENGTH}, {LENGTH + 1}])
def test_a_search_is_vain_when_what_was_there_is_gone(lengths: set[int]) -> None:
    search = Search("starting", lengths, lambda decoder: False)
    looks = [deployment(None), deployment("decoding"), deployment(None)]
    assert [(search.found_in(look, 0.0), search.is_vain)[1] for look in looks] == [False, False, lengths == {LENGTH}]
