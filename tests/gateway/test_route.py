"""Who decodes and who prefills: the rules one by one, then properties over random fleets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.gateway.route import (
    ASSUMED,
    UNFELT_S,
    UNFELT_SHARE,
    DecoderView,
    Pair,
    PrefillerView,
    Price,
    Route,
    TransferCost,
    Wanted,
    choose_prefiller,
    num_pages_wanted,
    route,
)
from headrace.protocol.control import Prefilling

WANTED = Wanted(num_tokens=101, max_tokens=20)
LONG = Wanted(num_tokens=2001, max_tokens=20)


def decoder(uuid: str = "d", **changes: object) -> DecoderView:
    plain = DecoderView(uuid=uuid, num_free_pages=1000, page_size=16, num_running=0, max_running=8)
    return replace(plain, **changes)  # type: ignore[arg-type]


def at(rate: float, step_s: float = 0.0) -> Prefilling:
    return Prefilling(step_s=step_s, rate=rate)


def prefiller(uuid: str = "p", *, queued: int = 0, longest: int = 4096, **changes: object) -> PrefillerView:
    plain = PrefillerView(uuid=uuid, num_queued_tokens=queued, max_tokens=longest)
    return replace(plain, **changes)  # type: ignore[arg-type]


def way(chosen: Route | None) -> tuple[str, str | None]:
    assert chosen is not None
    return chosen.decoder, chosen.prefiller


def price(chosen: Route | None) -> Price:
    assert chosen is not None
    return chosen.price


# ---- who is there ------------------------------------------------------------------------------------------------


def test_without_a_decoder_there_is_no_route() -> None:
    assert route([], [prefiller()], WANTED) is None


def test_a_decoder_is_paired_with_a_prefiller() -> None:
    assert way(route([decoder()], [prefiller()], WANTED)) == ("d", "p")


def test_without_a_prefiller_the_decoder_prefills() -> None:
    assert way(route([decoder()], [], WANTED)) == ("d", None)


def test_a_colocated_instance_prefills_by_itself() -> None:
    assert way(route([decoder(is_colocated=True)], [prefiller()], WANTED)) == ("d", None)


def test_one_token_needs_no_prefill() -> None:
    assert way(route([decoder()], [prefiller()], Wanted(num_tokens=1, max_tokens=20))) == ("d", None)


def test_a_prefiller_that_cannot_hold_the_prompt_is_left_out() -> None:
    prefillers = [prefiller("small", longest=100), prefiller("large", queued=1000)]
    assert way(route([decoder()], prefillers, WANTED)) == ("d", "large")
    assert way(route([decoder()], prefillers[:1], WANTED)) == ("d", None)


# ---- which prefiller ---------------------------------------------------------------------------------------------


def test_the_prefiller_with_the_fewest_queued_tokens_is_asked() -> None:
    prefillers = [prefiller("p1", queued=9), prefiller("p2", queued=3), prefiller("p3", queued=5)]
    assert way(route([decoder()], prefillers, WANTED)) == ("d", "p2")


def test_a_queue_counts_as_long_as_it_takes() -> None:
    prefillers = [
        prefiller("slow", queued=100, prefilling=at(500.0)),
        prefiller("fast", queued=300, prefilling=at(5000.0)),
    ]
    chosen = route([decoder()], prefillers, WANTED)
    assert way(chosen) == ("d", "fast")
    assert price(chosen) == Price(wait_s=0.06, prefill_s=0.02)


def test_the_shortest_prompt_takes_a_step() -> None:
    prefillers = [prefiller("p1", prefilling=at(5000.0, 0.03)), prefiller("p2", prefilling=at(2000.0))]
    assert way(route([decoder()], prefillers, Wanted(num_tokens=5, max_tokens=20))) == ("d", "p2")
    chosen = route([decoder()], prefillers, WANTED)
    assert way(chosen) == ("d", "p1") and price(chosen).prefill_s == pytest.approx(0.05)
    cached = [replace(view, cached_tokens=100) for view in prefillers]
    assert price(route([decoder()], cached, WANTED)).prefill_s == 0


def test_a_prefiller_that_has_the_prefix_is_asked_until_its_queue_outweighs_it() -> None:
    other = prefiller("other", prefilling=at(1000.0))
    assert way(route([decoder()], [other, prefiller("has", queued=1500, cached_tokens=1600)], LONG)) == ("d", "has")
    assert way(route([decoder()], [other, prefiller("has", queued=1700, cached_tokens=1600)], LONG)) == ("d", "other")


def test_a_pair_with_a_slow_link_is_left_for_one_with_a_fast_one() -> None:
    decoders, prefillers = [decoder("d1"), decoder("d2")], [prefiller("p1"), prefiller("p2")]
    slow = TransferCost(base_s=0.001, token_s=1e-3)
    transfers = {("p1", "d1"): slow, ("p1", "d2"): slow, ("p2", "d1"): slow}
    chosen = route(decoders, prefillers, LONG, transfers)
    assert way(chosen) == ("d2", "p2")
    chosen = route(decoders, prefillers, LONG, transfers | {("p2", "d2"): TransferCost(token_s=2e-3)})
    assert way(chosen) == ("d1", "p1")
    assert price(chosen).transfer_s == pytest.approx(2.001)


def test_what_the_decoder_has_is_computed_again_and_does_not_travel() -> None:
    transfers = {("p", "d"): TransferCost(token_s=1e-3)}
    chosen = route([decoder(cached_tokens=1600)], [prefiller(cached_tokens=400)], LONG, transfers)
    assert price(chosen) == Price(prefill_s=1.6, transfer_s=0.4)


def test_one_that_has_not_measured_counts_as_the_fastest_that_is_known() -> None:
    chosen = route([decoder()], [prefiller("known", queued=200, prefilling=at(4000.0)), prefiller("new")], WANTED)
    assert way(chosen) == ("d", "new") and price(chosen).prefill_s == 100 / 4000
    assert price(route([decoder()], [prefiller()], WANTED)).prefill_s == 100 / ASSUMED.rate


def test_after_a_failed_ticket_the_cheapest_prefiller_for_that_decoder_is_chosen() -> None:
    prefillers = [prefiller("near"), prefiller("far")]
    transfers = {("far", "d"): TransferCost(base_s=1.0)}
    fast = decoder(prefilling=at(1e6))
    assert choose_prefiller(fast, prefillers, LONG, transfers) == "near"
    assert choose_prefiller(fast, prefillers[1:], LONG, transfers) == "far"
    assert choose_prefiller(fast, [], LONG) is None


# ---- which decoder -----------------------------------------------------------------------------------------------


def test_among_decoders_with_room_the_one_that_runs_the_fewest_is_taken() -> None:
    decoders = [decoder("a", num_running=3, num_free_pages=100), decoder("b", num_running=2, num_free_pages=8)]
    assert way(route(decoders, [prefiller()], WANTED)) == ("b", "p")
    assert way(route(decoders, [], WANTED)) == ("b", None)


def test_room_is_prompt_and_growth_and_a_place_to_run() -> None:
    assert num_pages_wanted(WANTED, 16) == 8  # 121 tokens
    assert num_pages_wanted(Wanted(num_tokens=100, max_tokens=10**6), 16) == 11  # 164 tokens
    idle_but_small = decoder("a", num_free_pages=7)
    idle_but_full = decoder("b", num_running=8, num_free_pages=9)
    assert way(route([idle_but_small, idle_but_full, decoder("c", num_running=7)], [], WANTED)) == ("c", None)


def test_where_nobody_has_room_the_most_free_pages_win() -> None:
    decoders = [decoder("a", num_free_pages=3, cached_tokens=96), decoder("b", num_free_pages=5, num_running=4)]
    assert way(route(decoders, [], WANTED)) == ("b", None)


def test_the_decoder_that_has_the_prefix_is_taken_also_where_the_rest_comes_for_nothing() -> None:
    has = decoder("b", cached_tokens=1600)
    assert way(route([decoder("a"), has], [prefiller()], LONG)) == ("b", "p")
    assert way(route([decoder("a", is_colocated=True), replace(has, is_colocated=True)], [], LONG)) == ("b", None)


def test_a_busy_colocated_instance_is_left_for_an_idle_one_when_recomputing_is_cheaper_than_waiting() -> None:
    idle = decoder("idle", is_colocated=True, prefilling=at(1000.0))
    busy = decoder("busy", is_colocated=True, prefilling=at(1000.0), cached_tokens=1600, num_running=1)
    assert way(route([idle, replace(busy, num_queued_tokens=2500)], [], LONG)) == ("busy", None)
    assert way(route([idle, replace(busy, num_queued_tokens=3500)], [], LONG)) == ("idle", None)


def test_differences_that_nobody_feels_do_not_crowd_one_decoder() -> None:
    slightly_slower = decoder("a", hand_over_s=0.009)
    assert way(route([slightly_slower, decoder("b", num_running=1)], [prefiller()], WANTED)) == ("a", "p")
    much_slower = decoder("a", hand_over_s=0.3)
    assert way(route([much_slower, decoder("b", num_running=1)], [prefiller()], WANTED)) == ("b", "p")


# ---- at the decoder, or at a prefiller ---------------------------------------------------------------------------

A_TRANSFER: dict[Pair, TransferCost] = {("p", "d"): TransferCost(base_s=0.05)}


def at_decoder(num_tokens: int, *, prefill: PrefillerView | None = None, **changes: object) -> bool:
    """Whether the decoder computes so many tokens by itself: both do 1,000 a second."""
    wanted = Wanted(num_tokens=num_tokens + 1, max_tokens=20)
    views = decoder(**{"prefilling": at(1000.0)} | changes), prefill or prefiller(prefilling=at(1000.0))
    return way(route([views[0]], [views[1]], wanted, A_TRANSFER)) == ("d", None)


def test_short_prompts_stay_at_the_decoder_and_long_ones_go() -> None:
    assert at_decoder(49) and not at_decoder(51)  # the transfer's 50 ms against a stream's stall


def test_what_counts_is_what_the_decoder_does_not_have() -> None:
    has_it_too = prefiller(prefilling=at(1000.0), cached_tokens=800)
    assert at_decoder(849, cached_tokens=800, prefill=has_it_too)
    assert not at_decoder(851, cached_tokens=800, prefill=has_it_too)
    assert at_decoder(851, cached_tokens=800)  # a prefiller would compute all of it


def test_streams_that_decode_there_make_it_dearer() -> None:
    assert not at_decoder(30, num_running=2) and at_decoder(20, num_running=2)


def test_a_prefiller_that_is_busy_makes_it_cheaper() -> None:
    assert at_decoder(240, prefill=prefiller(prefilling=at(1000.0), queued=200))
    assert not at_decoder(240, prefill=prefiller(prefilling=at(1000.0), queued=180))


def test_prompts_that_wait_at_the_decoder_make_it_dearer() -> None:
    assert at_decoder(10, num_queued_tokens=20) and not at_decoder(10, num_queued_tokens=40)


def test_a_decoder_that_would_break_its_budget_or_has_not_measured_computes_only_what_it_must() -> None:
    assert not at_decoder(10, prefilling=at(0.0))
    assert not at_decoder(10, prefilling=None)
    assert way(route([decoder(prefilling=at(0.0))], [], WANTED)) == ("d", None)


def test_a_prompt_that_the_decoder_has_waits_for_no_busy_prefiller() -> None:
    all_of_it = decoder(prefilling=at(1000.0), cached_tokens=100, num_running=5, num_queued_tokens=5000)
    chosen = route([all_of_it], [prefiller(queued=10)], WANTED)
    assert way(chosen) == ("d", None) and price(chosen) == Price()
    unmeasured = replace(all_of_it, prefilling=None)  # no ticket is opened, wherever it is sent
    assert price(route([unmeasured], [prefiller(queued=10)], WANTED)) == Price(wait_s=0.01)


def test_the_terms_of_a_price_can_be_read() -> None:
    chosen = Price(wait_s=0.25, prefill_s=0.125, transfer_s=0.01, hand_over_s=0.005, stall_s=1.0)
    assert str(chosen) == "wait 250.0 ms, prefill 125.0 ms, transfer 10.0 ms, hand-over 5.0 ms, stall 1000.0 ms"
    assert chosen.ttft_s == sum(chosen.terms.values()) == pytest.approx(0.39)


# ---- properties --------------------------------------------------------------------------------------------------

speeds = st.sampled_from([None, at(0.0), at(100.0), at(1000.0), at(1000.0, 0.05), at(1500.0, 0.01)])
cached = st.sampled_from([0, 0, 32, 96, 160])
decoders_of_a_fleet = st.lists(
    st.builds(
        DecoderView,
        uuid=st.text("abcdef", min_size=4, max_size=4),
        is_colocated=st.booleans(),
        num_free_pages=st.integers(0, 12),
        page_size=st.just(16),
        num_running=st.integers(0, 4),
        max_running=st.integers(1, 4),
        num_queued_tokens=st.integers(0, 200),
        cached_tokens=cached,
        prefilling=speeds,
        hand_over_s=st.sampled_from([0.0, 0.005, 0.05]),
    ),
    min_size=1,
    max_size=5,
    unique_by=lambda view: view.uuid,
)
prefillers_of_a_fleet = st.lists(
    st.builds(
        PrefillerView,
        uuid=st.text("uvwxyz", min_size=4, max_size=4),
        num_queued_tokens=st.integers(0, 200),
        max_tokens=st.integers(1, 200),
        cached_tokens=cached,
        prefilling=speeds,
    ),
    max_size=4,
    unique_by=lambda view: view.uuid,
)


def is_measured(view: DecoderView | PrefillerView) -> bool:
    return view.prefilling is not None and view.prefilling.rate > 0


wishes = st.builds(Wanted, num_tokens=st.integers(1, 150), max_tokens=st.integers(1, 100))
transfer_costs = st.lists(
    st.builds(TransferCost, base_s=st.sampled_from([0.0, 0.02]), token_s=st.sampled_from([0.0, 1e-4, 1e-2])),
    min_size=20,
    max_size=20,
)


def of_pairs(
    decoders: list[DecoderView], prefillers: list[PrefillerView], costs: list[TransferCost]
) -> dict[Pair, TransferCost]:
    pairs = [(prefiller.uuid, decoder.uuid) for prefiller in prefillers for decoder in decoders]
    return dict(zip(pairs, costs, strict=False))


@given(decoders_of_a_fleet, prefillers_of_a_fleet, wishes, transfer_costs)
def test_a_route_is_one_of_the_best_and_depends_on_no_order(
    decoders: list[DecoderView], prefillers: list[PrefillerView], wanted: Wanted, costs: list[TransferCost]
) -> None:
    transfers = of_pairs(decoders, prefillers, costs)
    chosen = route(decoders, prefillers, wanted, transfers)
    assert chosen is not None
    assert route(decoders[::-1], prefillers[::-1], wanted, transfers) == chosen
    by_uuid = {view.uuid: view for view in decoders}
    best = by_uuid[chosen.decoder]

    def has_room(view: DecoderView) -> bool:
        needed = wanted.num_tokens + min(wanted.max_tokens, 64)
        return view.num_free_pages * 16 >= needed and view.num_running < view.max_running

    alone = {view.uuid: route([view], prefillers, wanted, transfers) for view in decoders}
    roomy = [view for view in decoders if has_room(view)]
    if not roomy:
        assert best.num_free_pages == max(view.num_free_pages for view in decoders)
    else:
        assert has_room(best)
        if all(is_measured(view) for view in decoders) and all(is_measured(view) for view in prefillers):
            least_s = min(price(alone[view.uuid]).total_s for view in roomy)
            felt_s = least_s + max(UNFELT_S, UNFELT_SHARE * least_s)
            as_good = [view for view in roomy if price(alone[view.uuid]).total_s <= felt_s]
            assert best.num_running == min(view.num_running for view in as_good) and best in as_good
    able = {view.uuid for view in prefillers if view.max_tokens >= wanted.num_tokens}
    if best.is_colocated or wanted.num_tokens == 1 or not able:
        assert chosen.prefiller is None
    elif not is_measured(best):
        assert chosen.prefiller in able


@given(decoders_of_a_fleet, prefillers_of_a_fleet, wishes, transfer_costs, st.integers(1, 500))
def test_more_to_wait_for_never_makes_an_instance_more_attractive(
    decoders: list[DecoderView],
    prefillers: list[PrefillerView],
    wanted: Wanted,
    costs: list[TransferCost],
    longer: int,
) -> None:
    transfers = of_pairs(decoders, prefillers, costs)
    before = way(route(decoders, prefillers, wanted, transfers))
    first, *others = decoders
    busier = replace(first, num_queued_tokens=first.num_queued_tokens + longer)
    after = way(route([busier, *others], prefillers, wanted, transfers))
    assert after[0] != first.uuid or before[0] == first.uuid
    assert after != (first.uuid, None) or before == after
    if prefillers:
        # Seen from one decoder: of several, that which was out of question may be within what nobody feels.
        source, *rest = prefillers
        before = way(route([first], prefillers, wanted, transfers))
        busy = replace(source, num_queued_tokens=source.num_queued_tokens + longer)
        after = way(route([first], [busy, *rest], wanted, transfers))
        assert after[1] != source.uuid or before == after


@given(decoders_of_a_fleet, prefillers_of_a_fleet, wishes, transfer_costs)
def test_a_prefix_never_makes_a_decoder_dearer(
    decoders: list[DecoderView], prefillers: list[PrefillerView], wanted: Wanted, costs: list[TransferCost]
) -> None:
    transfers = of_pairs(decoders, prefillers, costs)
    for view in decoders:
        without = route([view], prefillers, wanted, transfers)
        having = route([replace(view, cached_tokens=view.cached_tokens + 16)], prefillers, wanted, transfers)
        assert price(having).total_s <= price(without).total_s
