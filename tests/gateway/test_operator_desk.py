"""What an operator is told at the control socket: who is there, and where each request is."""

import asyncio
from pathlib import Path

from gateway_fleet import ask, fleet, generation
from scripted_instance import ScriptedDecoder, on_loop, until
from scripted_operator import OPERATOR, ScriptedOperator, operator_of

from headrace.protocol.control import CONTROL_VERSION
from headrace.protocol.operator import Inspect, Refused, RequestFacts, Stage


async def request_at(operator: ScriptedOperator, stage: Stage) -> RequestFacts:
    """The one request, once it is there."""
    async with asyncio.timeout(5):
        while True:
            (*facts,) = (await operator.deployment()).requests
            if [request.stage for request in facts] == [stage]:
                return facts[0]
            await asyncio.sleep(0.005)


@on_loop
async def test_instances_are_told_with_what_they_said_of_themselves(tmp_path: Path) -> None:
    async with fleet(tmp_path) as around, operator_of(around) as operator:
        await until(lambda: all(instance.status for instance in around.dispatcher.alive()))
        told = await operator.deployment()
        assert {(facts.uuid, facts.name, facts.role, facts.standing, facts.pid) for facts in told.instances} == {
            (instance.uuid, instance.announce.name, instance.announce.role, "serving", 1)
            for instance in (around.prefiller, around.decoder)
        }
        by_role = {facts.role: facts for facts in told.instances}
        assert by_role["prefiller"].fabric_address == b"fabric" and by_role["prefiller"].silent_s < 1
        status = by_role["decoder"].status
        assert status is not None and status.num_free_pages == 64
        assert told.gateway.name == "gateway" and told.gateway.url == "http://127.0.0.1:8000"
        assert told.requests == () and told.num_requests == 0


@on_loop
async def test_who_is_silent_or_different_is_told_too(tmp_path: Path) -> None:
    async with fleet(tmp_path) as around, operator_of(around) as operator:
        around.prefiller.is_hung = True
        other = ScriptedDecoder(around.dispatcher.endpoint, fingerprint="another")
        await around.instances.enter_async_context(other)
        await around.knows(1)
        told = {facts.uuid: facts for facts in (await operator.deployment()).instances}
        assert told[around.prefiller.uuid].standing == "absent" and told[around.prefiller.uuid].silent_s > 0.3
        assert told[other.uuid].standing == "refused" and "fingerprint differs" in told[other.uuid].refusal
        around.prefiller.is_hung = False
        await around.knows(2)


@on_loop
async def test_a_request_is_told_from_stage_to_stage(tmp_path: Path) -> None:
    async with fleet(tmp_path) as around, operator_of(around) as operator:
        prefiller, decoder = around.prefiller, around.decoder
        prefiller.num_waits, decoder.accept_delay_s, decoder.is_stalled, decoder.token_s = 10**6, 0.1, True, 0.05
        prefiller.tells_prefilled = False
        asked = ask(around.dispatcher, generation(max_tokens=8, tier="flex"))
        waiting = await request_at(operator, "waiting")
        assert (waiting.tier, waiting.decoder, waiting.num_prompt_tokens) == ("flex", None, 40)
        prefiller.num_waits = 0
        assert (await request_at(operator, "offered")).decoder == decoder.uuid
        assert (await request_at(operator, "prefilling")).prefiller == prefiller.uuid
        prefiller.say_prefilled("request")
        await request_at(operator, "transferring")
        decoder.is_stalled = False
        decoding = await request_at(operator, "decoding")
        assert (decoding.decoder, decoding.request_id) == (decoder.uuid, "request") and decoding.num_tokens >= 1
        await asked
        assert (await operator.deployment()).requests == ()


@on_loop
async def test_a_resumed_request_counts_the_tokens_of_both_lives(tmp_path: Path) -> None:
    async with fleet(tmp_path, decoders=2) as around, operator_of(around) as operator:
        for decoder in around.decoders:
            decoder.token_s = 0.02
        asked = ask(around.dispatcher, generation(max_tokens=40))
        first = await request_at(operator, "decoding")
        await until(lambda: any(decoder.running for decoder in around.decoders))
        (runs,) = (decoder for decoder in around.decoders if decoder.uuid == first.decoder)
        await asyncio.sleep(0.1)
        before = (await operator.deployment()).requests[0].num_tokens
        await runs.leave()
        resumed = await request_at(operator, "decoding")
        assert resumed.request_id == "request~1" and resumed.decoder != runs.uuid
        assert resumed.num_tokens >= before and resumed.num_prompt_tokens == 40
        runs.running.clear()
        await asked


@on_loop
async def test_an_operator_of_another_version_is_told_so_and_is_no_instance(tmp_path: Path) -> None:
    async with fleet(tmp_path) as around, operator_of(around) as operator:
        answer = await operator.ask(Inspect(sender=OPERATOR, version=CONTROL_VERSION + 1))
        assert isinstance(answer, Refused) and answer.field == "version"
        assert f"must be {CONTROL_VERSION} as the gateway's, is {CONTROL_VERSION + 1}" in answer.text
        assert len((await operator.deployment()).instances) == 2
