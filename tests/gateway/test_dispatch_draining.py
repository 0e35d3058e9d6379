"""Instances that are to leave or to change role: told by an operator, given nothing new, and no request is lost."""

from pathlib import Path

import pytest
from gateway_fleet import ask, fleet, generation, is_answered
from scripted_instance import ScriptedDecoder, on_loop, tokens_after, until
from scripted_operator import operator_of

from headrace.gateway.generation import Overloaded
from headrace.protocol.control import Drain, Generate, Prefillers, Reserve, Successor, UsePrefiller
from headrace.protocol.operator import Leaves, Refused


@on_loop
async def test_a_decoder_that_drains_ends_what_it_runs_and_is_given_nothing_more(tmp_path: Path) -> None:
    async with fleet(tmp_path, decoders=2) as around, operator_of(around) as operator:
        for decoder in around.decoders:
            decoder.token_s = 0.02
        asked = ask(around.dispatcher, generation(max_tokens=20))
        await until(lambda: any(decoder.running for decoder in around.decoders))
        leaving, other = sorted(around.decoders, key=lambda decoder: not decoder.running)
        answer = await operator.dismiss(leaving.uuid)
        assert isinstance(answer, Leaves) and answer.successor is None
        assert (await leaving.hears(Drain)).successor is None
        await until(lambda: len(around.dispatcher._exchange.instances.open_decoders()) == 1, "it is known to drain")
        assert (await operator.standings())[leaving.uuid] == "draining"
        for number in range(3):
            await is_answered(around.dispatcher, generation(f"after-{number}"))
        tokens, _ = await asked
        assert tokens == tokens_after(40, 20)
        assert [len(decoder.all_heard(Generate)) for decoder in (leaving, other)] == [1, 3]
        await leaving.leave()
        await until(lambda: len(around.dispatcher.alive()) == 2)
        assert leaving.uuid not in await operator.standings()
        assert around.dispatcher.statistics().num_events.get("lost", 0) == 0


@on_loop
async def test_a_prefiller_that_drains_keeps_its_leases_and_stays_named_until_it_leaves(tmp_path: Path) -> None:
    async with fleet(tmp_path, prefillers=1) as around, operator_of(around) as operator:
        prefiller, decoder = around.prefiller, around.decoder
        decoder.is_stalled = True
        asked = ask(around.dispatcher, generation(max_tokens=3))
        await until(lambda: bool(prefiller.used), "its lease is used")
        assert isinstance(await operator.dismiss(prefiller.uuid), Leaves)
        await prefiller.hears(Drain)
        await until(lambda: around.dispatcher._exchange.instances.open_prefillers() == [], "it is known to drain")
        decoder.is_stalled = False
        await asked
        await is_answered(around.dispatcher, generation("local"))
        assert len(prefiller.all_heard(Reserve)) == 1 and len(decoder.all_heard(Prefillers)[-1].prefillers) == 1
        await prefiller.leave()
        await until(lambda: decoder.all_heard(Prefillers)[-1].prefillers == (), "decoders hear that it has left")


@on_loop
async def test_a_decoder_that_drains_is_still_given_another_prefiller(tmp_path: Path) -> None:
    async with fleet(tmp_path, prefillers=2, decoders=2) as around, operator_of(around) as operator:
        for decoder in around.decoders:
            decoder.num_failing_tickets, decoder.accept_delay_s = 1, 0.1
        asked = ask(around.dispatcher, generation(max_tokens=3))
        await until(lambda: any(decoder.running for decoder in around.decoders))
        (leaving,) = (decoder for decoder in around.decoders if decoder.running)
        await operator.dismiss(leaving.uuid)
        await leaving.hears(Drain)
        await asked
        (answer,) = leaving.all_heard(UsePrefiller)
        assert answer.prefill is not None and leaving.counts["accepted"] == 1


@on_loop
async def test_the_last_decoder_leaves_only_by_force_and_then_clients_are_told(tmp_path: Path) -> None:
    async with fleet(tmp_path) as around, operator_of(around) as operator:
        refused = await operator.dismiss(around.decoder.uuid)
        assert isinstance(refused, Refused) and refused.field == "force"
        assert "without it no request can be served" in refused.text
        await is_answered(around.dispatcher, generation())
        around.decoder.token_s = 0.02
        asked = ask(around.dispatcher, generation("long", max_tokens=20))
        await until(lambda: bool(around.decoder.running))
        assert isinstance(await operator.dismiss(around.decoder.uuid, is_forced=True), Leaves)
        await until(lambda: not around.dispatcher.is_ready())
        with pytest.raises(Overloaded, match="no decoder is here") as told:
            await is_answered(around.dispatcher, generation("late"))
        assert told.value.status == 503
        tokens, _ = await asked
        assert tokens == tokens_after(40, 20)


@on_loop
async def test_a_request_that_waits_when_the_last_decoder_drains_is_told_in_the_end(tmp_path: Path) -> None:
    async with fleet(tmp_path) as around, operator_of(around) as operator:
        around.decoder.max_running = 0
        asked = ask(around.dispatcher, generation())
        await around.decoder.hears(Generate)
        await operator.dismiss(around.decoder.uuid, is_forced=True)
        with pytest.raises(Overloaded, match="no decoder came back"):
            await asked


@on_loop
async def test_a_role_is_changed_under_a_free_name_with_what_the_operator_says(tmp_path: Path) -> None:
    async with fleet(tmp_path, decoders=2) as around, operator_of(around) as operator:
        taken = ScriptedDecoder(around.dispatcher.endpoint, name="prefiller-0")
        await around.instances.enter_async_context(taken)
        await around.knows(4)
        answer = await operator.dismiss(around.decoders[0].uuid, "prefiller")
        assert isinstance(answer, Leaves) and answer.successor == "prefiller-1"
        told = (await around.decoders[0].hears(Drain)).successor
        assert told == Successor(role="prefiller", name="prefiller-1", tpot_s=None, max_stall_s=None)
        await operator.dismiss(around.prefiller.uuid, "decoder", tpot_s=0.05)
        told = (await around.prefiller.hears(Drain)).successor
        assert told == Successor(role="decoder", name="decoder-0", tpot_s=0.05, max_stall_s=None)


@on_loop
async def test_what_cannot_be_done_is_refused_with_the_reason(tmp_path: Path) -> None:
    async with fleet(tmp_path, role="colocated") as around, operator_of(around) as operator:
        grouped = ScriptedDecoder(around.dispatcher.endpoint, dp=2)
        await around.instances.enter_async_context(grouped)
        await around.knows(3)
        for refused, field, text in (
            (await operator.dismiss("0" * 32), "instance", f"must be one that is here, {'0' * 32} is not"),
            (await operator.dismiss(around.decoder.uuid, "prefiller"), "instance", "has no fabric"),
            (await operator.dismiss(grouped.uuid, "prefiller"), "instance", "has 2"),
            (await operator.dismiss(around.prefiller.uuid, "prefiller"), "role", "is a prefiller already"),
        ):
            assert isinstance(refused, Refused) and refused.field == field and text in refused.text
        assert isinstance(await operator.dismiss(grouped.uuid), Leaves)
        await until(lambda: len(around.dispatcher._exchange.instances.open_decoders()) == 1)
        assert isinstance(await operator.dismiss(grouped.uuid), Leaves), "it was told already"
        leaving = await operator.dismiss(around.prefiller.uuid)
        assert isinstance(leaving, Leaves)
        await until(lambda: around.dispatcher._exchange.instances.open_prefillers() == [])
        refused = await operator.dismiss(around.prefiller.uuid, "decoder")
        assert isinstance(refused, Refused) and "must not be leaving" in refused.text
        assert not around.decoder.all_heard(Drain) and len(grouped.all_heard(Drain)) == 1
