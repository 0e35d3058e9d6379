"""What is promised at a decoder, by this gateway's streams and by what it tells, and how long a stream stays."""

import pytest
from gateway_fleet import generation
from msgspec.structs import replace

from headrace.gateway.budgets import NO_TIERS, Budget, Tiers
from headrace.gateway.dispatch.streams import Streams
from headrace.gateway.forecast import Promise
from headrace.gateway.route import DecoderView
from headrace.protocol.control import Decoding

VIEW = DecoderView(uuid="d", num_free_pages=9, page_size=16, num_running=1, max_running=8)
TIERS = Tiers(budgets={"interactive": Budget(tpot_s=0.05), "flex": Budget(tpot_s=0.5)})


def test_the_tightest_of_the_interactive_promises_counts_while_it_is_there() -> None:
    streams = Streams(TIERS)
    assert streams.promise(VIEW) == Promise(tpot_s=0.05, has_budget=True)
    streams.began("a", "d", generation(budget=Budget(tpot_s=0.02)), 0.0)
    streams.began("b", "d", generation(budget=Budget(tpot_s=0.01), tier="flex"), 0.0)
    streams.began("c", "e", generation(budget=Budget(tpot_s=0.001)), 0.0)
    assert streams.promise(VIEW) == Promise(tpot_s=0.02, has_budget=True, is_due=True)
    streams.ended("a", 1.0)
    assert streams.promise(VIEW) == Promise(tpot_s=0.05, has_budget=True)
    assert (streams.tpot_of("interactive"), streams.tpot_of("flex")) == (0.05, 0.5)


def test_other_gateways_requests_are_told_of_by_the_decoder() -> None:
    told = Decoding(step_s=0.0, row_s=0.0, key_s=0.0, num_rows=2, num_keys=9, num_interactive=1)
    assert Streams(TIERS).promise(replace(VIEW, decoding=told)) == Promise(tpot_s=0.05, has_budget=True, is_due=True)
    assert Streams(NO_TIERS).promise(replace(VIEW, decoding=told)) == Promise(tpot_s=None, is_due=True)


def test_a_stay_is_the_mean_of_those_that_ended_the_newest_most() -> None:
    streams = Streams(NO_TIERS)
    assert streams.stay_s is None
    streams.began("a", "d", generation(), 10.0)
    streams.ended("a", 12.0)
    assert streams.stay_s == 2.0
    for nth in range(200):
        streams.began("b", "d", generation(), float(nth))
        streams.ended("b", nth + 4.0)
    assert streams.stay_s == pytest.approx(4.0, abs=0.01)
