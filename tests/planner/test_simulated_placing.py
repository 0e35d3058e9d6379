"""Where simulated requests go: as `gateway.route` says of everybody, though it is shown only those that could win."""

import random

from deployments import arrivals, instance, scenario
from hypothesis import event, given, settings
from hypothesis import strategies as st

from headrace.bench.workload import Arrival
from headrace.gateway.route import DecoderView, Route, route
from headrace.planner.clock import Clock
from headrace.planner.decoding import Decoder
from headrace.planner.pages import Prefix
from headrace.planner.placing import Placing, wanted_of
from headrace.planner.prefilling import Prefiller
from headrace.planner.requests import Request
from headrace.planner.scenario import LinkModel, Network, Role, Scenario
from headrace.planner.simulate import simulate


def a_request(rng: random.Random, index: int) -> Request:
    blocks = tuple(rng.randint(0, 1) for _ in range(rng.choice([0, 2])))
    tier = rng.choice(["interactive", "flex"])
    arrival = Arrival(
        at_s=0.0, prompt_tokens=rng.randint(2, 900), max_tokens=rng.randint(1, 200), blocks=blocks, tier=tier
    )
    prefix = Prefix(arrival, own=index, block_tokens=64, num_tokens=arrival.prompt_tokens, page_size=16)
    return Request(index=index, arrival=arrival, block_tokens=64, prefix=prefix)


class Fleet:
    """Instances as drawn requests have left them, in the middle of a step."""

    def __init__(self, deployment: Scenario, rng: random.Random, num_requests: int) -> None:
        clock = Clock()
        self.decoders = [
            Decoder(one, clock, closed_form=True, on_room=lambda _: None, on_end=lambda _: None)
            for one in deployment.instances
            if one.decodes
        ]
        self.prefillers = [
            Prefiller(one, deployment.kv, clock, lambda: None) for one in deployment.instances if not one.decodes
        ]
        self.placing = Placing(deployment, self.decoders, self.prefillers, clock)
        for index in range(num_requests):
            request, decoder = a_request(rng, index), rng.choice(self.decoders)
            if decoder.try_admit(request):
                decoder.start(request)
            if self.prefillers and rng.random() < 0.3:
                rng.choice(self.prefillers).try_lease(request)
            for _ in range(rng.randint(0, 3)):
                clock.step()

    def view(self, chosen: Route, request: Request) -> DecoderView:
        views = self.placing.fleet(request).decoders
        return next(view for view in views if view.uuid == chosen.decoder)


def deployment_of(role: Role, *, prefills: bool, places: int) -> Scenario:
    prefillers = [instance(f"p{nth}", "prefiller", host=f"h{nth % places}") for nth in range(3 * (role == "decoder"))]
    decoders = [
        instance(f"d{nth}", role, host=f"h{nth % places}", num_pages=200, max_running=6, prefills=prefills)
        for nth in range(8)
    ]
    network = Network(routed=LinkModel(bytes_s=1e9), same_host=LinkModel(bytes_s=1e11) if places > 1 else None)
    return scenario(*prefillers, *decoders, network=network)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 1 << 32),
    st.integers(0, 60),
    st.sampled_from([("colocated", False), ("decoder", False), ("decoder", True)]),
    st.sampled_from([1, 2]),
)
def test_leaving_out_who_could_not_win_changes_nothing(
    seed: int, num_requests: int, kind: tuple[Role, bool], places: int
) -> None:
    deployment = deployment_of(kind[0], prefills=kind[1], places=places)
    rng = random.Random(seed)
    fleet = Fleet(deployment, rng, num_requests)
    request = a_request(rng, 1000)
    found = fleet.placing.choose(request, ())
    whole = fleet.placing.fleet(request)
    granting = {one.spec.name for one in fleet.prefillers if one.leases.fits(request.num_known - 1, request.tier)} or {
        one.spec.name for one in fleet.prefillers
    }
    prefillers = [view for view in whole.prefillers if view.uuid in granting]
    expected = route(whole.decoders, prefillers, wanted_of(request), whole.transfers)
    assert found is not None and expected is not None
    chosen = found[1]
    event(f"remote: {chosen.prefiller is not None}")
    assert (chosen.price, chosen.prefiller is None) == (expected.price, expected.prefiller is None)
    ours, theirs = fleet.view(chosen, request), fleet.view(expected, request)
    assert (ours.num_running, ours.cached_tokens) == (theirs.num_running, theirs.cached_tokens)


def test_what_could_never_run_is_refused_and_who_comes_when_the_line_is_full() -> None:
    small = scenario(instance("c", "colocated", num_pages=100, max_running=1), max_queued=1)
    done = simulate(small, arrivals([(0.0, 500, 50), (0.001, 1600, 1), (0.01, 500, 1), (0.02, 500, 1)]))
    assert done[0].error is None and done[2].error is None
    assert done[1].error == "400: 1601 tokens, of at most 1600"
    assert done[3].error == "429: 1 requests wait already"


def test_background_work_does_not_take_the_room_that_an_interactive_request_waits_for() -> None:
    asked = arrivals([(0.0, 1000, 100), (0.001, 100, 100), (0.01, 1200, 10), (0.02, 100, 10)])
    asked = asked.__class__(
        name=asked.name,
        seed=1,
        arrivals=(*asked.arrivals[:3], Arrival(at_s=0.02, prompt_tokens=100, max_tokens=10, tier="flex")),
    )
    done = simulate(scenario(instance("c", "colocated", num_pages=100)), asked)
    assert done[3].token_s[0] > done[2].token_s[0] > done[0].token_s[-1]


def test_a_decoder_that_has_not_measured_chunks_computes_no_prompt_by_choice() -> None:
    def computed_at_decoder(*, prefills: bool, knows_chunks: bool) -> int:
        decoder = instance("d", "decoder", prefills=prefills, knows_chunks=knows_chunks)
        listed = arrivals((0.01 * nth, 500, 8) for nth in range(40))  # more than the prefiller keeps up with
        did = {one.name: one for one in simulate(scenario(instance("p", "prefiller"), decoder), listed).did}
        return did["d"].num_prefill_tokens

    assert computed_at_decoder(prefills=True, knows_chunks=True) > 0
    assert computed_at_decoder(prefills=True, knows_chunks=False) == 0
    assert computed_at_decoder(prefills=False, knows_chunks=True) == 0


def test_a_gateway_takes_for_queued_what_a_decoder_has_computed_since_its_last_status() -> None:
    clock = Clock()
    spec = instance("c", "colocated", chunk_tokens=64)
    decoder = Decoder(spec, clock, closed_form=True, on_room=lambda _: None, on_end=lambda _: None)
    arrival = Arrival(at_s=0.0, prompt_tokens=20_000, max_tokens=4)
    prefix = Prefix(arrival, own=0, block_tokens=64, num_tokens=20_000, page_size=16)
    request = Request(index=0, arrival=arrival, block_tokens=64, prefix=prefix)
    assert decoder.try_admit(request)
    decoder.start(request)
    while clock.now < 0.45:
        clock.step()
    assert decoder.queued_tokens["interactive"] < decoder.told_queued("interactive") == 19_999
    while clock.now < 0.5:
        clock.step()
    computed_since = decoder.told_queued("interactive") - decoder.queued_tokens["interactive"]
    assert computed_since == 64 * (clock.now > 0.5)
