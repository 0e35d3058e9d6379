"""Who decodes and who prefills: the rules one by one, then properties over random fleets."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.route import DecoderView, PrefillerView, Route, Wanted, num_pages_wanted, route

WANTED = Wanted(num_tokens=100, max_tokens=20)


def decoder(uuid: str = "d", **changes: object) -> DecoderView:
    plain = DecoderView(uuid=uuid, num_free_pages=100, page_size=16, num_running=0, max_running=8)
    return replace(plain, **changes)  # type: ignore[arg-type]


def prefiller(uuid: str = "p", *, queued: int = 0, longest: int = 4096) -> PrefillerView:
    return PrefillerView(uuid=uuid, num_queued_tokens=queued, max_tokens=longest)


def test_without_a_decoder_there_is_no_route() -> None:
    assert route([], [prefiller()], WANTED) is None


def test_a_decoder_is_paired_with_a_prefiller() -> None:
    assert route([decoder()], [prefiller()], WANTED) == Route(decoder="d", prefiller="p")


def test_without_a_prefiller_the_decoder_prefills() -> None:
    assert route([decoder()], [], WANTED) == Route(decoder="d", prefiller=None)


def test_a_colocated_instance_prefills_by_itself() -> None:
    assert route([decoder(is_colocated=True)], [prefiller()], WANTED) == Route(decoder="d", prefiller=None)


def test_one_token_needs_no_prefill() -> None:
    alone = Wanted(num_tokens=1, max_tokens=20)
    assert route([decoder()], [prefiller()], alone) == Route(decoder="d", prefiller=None)


def test_the_prefiller_with_the_fewest_queued_tokens_is_asked() -> None:
    prefillers = [prefiller("p1", queued=9), prefiller("p2", queued=3), prefiller("p3", queued=5)]
    assert route([decoder()], prefillers, WANTED) == Route(decoder="d", prefiller="p2")


def test_a_prefiller_that_cannot_hold_the_prompt_is_left_out() -> None:
    prefillers = [prefiller("small", longest=99), prefiller("large", queued=1000)]
    assert route([decoder()], prefillers, WANTED) == Route(decoder="d", prefiller="large")
    assert route([decoder()], prefillers[:1], WANTED) == Route(decoder="d", prefiller=None)


def test_among_decoders_with_room_the_one_that_runs_the_fewest_is_taken() -> None:
    decoders = [decoder("a", num_running=3, num_free_pages=100), decoder("b", num_running=2, num_free_pages=8)]
    assert route(decoders, [], WANTED) == Route(decoder="b", prefiller=None)


def test_room_is_prompt_and_growth_and_a_place_to_run() -> None:
    assert num_pages_wanted(WANTED, 16) == 8  # 120 tokens
    assert num_pages_wanted(Wanted(num_tokens=100, max_tokens=10**6), 16) == 11  # 164 tokens
    idle_but_small = decoder("a", num_free_pages=7)
    idle_but_full = decoder("b", num_running=8, num_free_pages=9)
    assert route([idle_but_small, idle_but_full, decoder("c", num_running=7)], [], WANTED) == Route(
        decoder="c", prefiller=None
    )


def test_where_nobody_has_room_the_most_free_pages_win() -> None:
    decoders = [decoder("a", num_free_pages=3), decoder("b", num_free_pages=5, num_running=4)]
    assert route(decoders, [], WANTED) == Route(decoder="b", prefiller=None)


decoders_of_a_fleet = st.lists(
    st.builds(
        DecoderView,
        uuid=st.text("abcdef", min_size=4, max_size=4),
        is_colocated=st.booleans(),
        num_free_pages=st.integers(0, 12),
        page_size=st.just(16),
        num_running=st.integers(0, 4),
        max_running=st.integers(1, 4),
    ),
    min_size=1,
    max_size=5,
    unique_by=lambda view: view.uuid,
)
prefillers_of_a_fleet = st.lists(
    st.builds(
        PrefillerView,
        uuid=st.text("abcdef", min_size=4, max_size=4),
        num_queued_tokens=st.integers(0, 3),
        max_tokens=st.integers(1, 200),
    ),
    max_size=4,
    unique_by=lambda view: view.uuid,
)


@given(decoders_of_a_fleet, prefillers_of_a_fleet, st.integers(1, 150), st.integers(1, 100))
def test_a_route_is_the_best_of_all_and_depends_on_no_order(
    decoders: list[DecoderView], prefillers: list[PrefillerView], num_tokens: int, max_tokens: int
) -> None:
    wanted = Wanted(num_tokens=num_tokens, max_tokens=max_tokens)
    chosen = route(decoders, prefillers, wanted)
    assert chosen is not None
    assert route(decoders[::-1], prefillers[::-1], wanted) == chosen
    by_uuid = {view.uuid: view for view in decoders}
    best = by_uuid[chosen.decoder]

    def has_room(view: DecoderView) -> bool:
        return view.num_free_pages * 16 >= num_tokens + min(max_tokens, 64) and view.num_running < view.max_running

    roomy = [view for view in decoders if has_room(view)]
    if roomy:
        assert has_room(best) and best.num_running == min(view.num_running for view in roomy)
    else:
        assert best.num_free_pages == max(view.num_free_pages for view in decoders)
    able = {view.uuid: view.num_queued_tokens for view in prefillers if view.max_tokens >= num_tokens}
    if best.is_colocated or num_tokens == 1 or not able:
        assert chosen.prefiller is None
    else:
        assert chosen.prefiller is not None and able[chosen.prefiller] == min(able.values())
