"""Instances of a simulation that die, and what becomes of who was there."""

import pytest
from deployments import arrivals, instance, poisson, scenario, split

from headrace.bench import metrics
from headrace.planner.scenario import Failure
from headrace.planner.simulate import simulate


def test_a_request_whose_decoder_dies_goes_on_elsewhere_with_the_tokens_that_it_had() -> None:
    asked = arrivals([(0.0, 500, 100)])
    failing = split(1, 2, failures=[Failure(instance="d0", at_s=0.3, down_s=5.0, noticed_s=0.5)])
    before, after = simulate(split(1, 2), asked)[0], simulate(failing, asked)[0]
    assert metrics.is_whole(after)
    kept = [token for token in before.token_s if token <= 0.3 + 1e-3]
    assert after.token_s[: len(kept)] == pytest.approx(tuple(kept))
    assert after.token_s[len(kept)] > 0.8  # noticed, and the prompt with these tokens computed again
    assert after.token_s[len(kept)] < 0.95


def test_a_prompt_whose_prefiller_dies_is_computed_by_another_or_by_its_decoder() -> None:
    asked = arrivals([(0.0, 1000, 5)])
    dies = Failure(instance="p0", at_s=0.02, down_s=5.0, noticed_s=0.1)
    for num_prefillers in (2, 1):
        done = simulate(split(num_prefillers, 1, failures=[dies]), asked)
        assert metrics.is_whole(done[0]) and done[0].token_s[0] > 0.12
        computed = {did.name: did.num_prefill_tokens for did in done.did}
        assert computed["p1" if num_prefillers == 2 else "d0"] == 999


def test_a_request_that_loses_its_decoder_again_and_again_is_given_up() -> None:
    dies = [Failure(instance="c", at_s=0.1 + nth, down_s=0.3, noticed_s=0.1) for nth in range(4)]
    done = simulate(scenario(instance("c", "colocated"), failures=dies), arrivals([(0.0, 100, 2000)]))
    assert done[0].error == "given up after 3 attempts"
    assert 0 < len(done[0].token_s) < 2000


def test_requests_wait_for_the_only_decoder_to_come_back() -> None:
    dies = Failure(instance="d0", at_s=1.0, down_s=2.0, noticed_s=0.5)
    done = simulate(split(1, 1, failures=[dies]), poisson(40, 20.0, prompt=(100, 300), output=(5, 20)))
    assert all(metrics.is_whole(record) for record in done)
    came = [record for record in done if 1.0 < record.arrival_s < 3.0]
    assert came and min(record.token_s[0] for record in came) > 3.0
