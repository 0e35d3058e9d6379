"""The dispatcher on a real control socket: requests the plain way, what is refused, its own begin and end. After each
test nothing is held anywhere: no lease, no place at a decoder, no entry."""

import asyncio
import logging
import stat
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import uvloop
from gateway_fleet import (
    A_PROMPT,
    QUICK,
    answer_to,
    ask,
    fleet,
    generation,
    is_answered,
    options_in,
    progress_of,
)
from scripted_instance import ScriptedDecoder, ScriptedInstance, on_loop, tokens_after, until

from headrace.errors import InputError
from headrace.gateway.dispatch.dispatcher import Dispatcher
from headrace.gateway.generation import GenerationFailed, Overloaded
from headrace.protocol.control import (
    Abort,
    Accepted,
    Beat,
    Generate,
    Prefillers,
    Reserve,
    ReturnLease,
    Sampling,
)

# ---- the plain way -----------------------------------------------------------------------------------------------


@on_loop
async def test_a_request_is_prefilled_in_one_place_and_decoded_in_another(tmp_path: Path) -> None:
    async with fleet(tmp_path) as around:
        tokens, last = await answer_to(around.dispatcher, generation())
        assert tokens == tokens_after(len(A_PROMPT), 5)
        assert (last.finish_reason, last.num_tokens, last.cached_tokens) == ("length", 5, 2)
        reserve, generate = await around.prefiller.hears(Reserve), await around.decoder.hears(Generate)
        assert (reserve.request_id, reserve.num_tokens) == ("request", len(A_PROMPT))
        assert generate.prefill is not None and generate.prefill.prefiller == around.prefiller.uuid
        assert (generate.token_ids, generate.num_prompt_tokens) == (A_PROMPT, len(A_PROMPT))
        assert 9 < generate.remaining_s <= reserve.remaining_s <= 10
        assert around.prefiller.used == ["1"] and around.prefiller.returned == []


def test_it_runs_on_uvloop_too(tmp_path: Path) -> None:
    async def play() -> None:
        async with fleet(tmp_path) as around:
            await is_answered(around.dispatcher, generation())

    uvloop.run(play())


@on_loop
async def test_a_stop_token_is_counted_and_not_passed_on(tmp_path: Path) -> None:
    async with fleet(tmp_path) as around:
        around.decoder.stops_after = 2
        tokens, last = await answer_to(around.dispatcher, generation())
        assert tokens == tokens_after(len(A_PROMPT), 2)
        assert (last.finish_reason, last.num_tokens) == ("stop", 3)


@on_loop
async def test_without_a_prefiller_decoders_prefill_by_themselves(tmp_path: Path) -> None:
    async with fleet(tmp_path, prefillers=0) as around:
        await is_answered(around.dispatcher, generation())
        assert (await around.decoder.hears(Generate)).prefill is None


@on_loop
async def test_colocated_instances_are_never_given_a_lease(tmp_path: Path) -> None:
    async with fleet(tmp_path, role="colocated") as around:
        await is_answered(around.dispatcher, generation())
        assert around.prefiller.all_heard(Reserve) == []
        assert around.decoder.all_heard(Prefillers) == []


@on_loop
async def test_a_lease_that_the_decoder_does_not_use_goes_back(tmp_path: Path) -> None:
    async with fleet(tmp_path) as around:
        around.decoder.uses_leases = False
        await is_answered(around.dispatcher, generation())
        await around.prefiller.hears(ReturnLease)
        assert around.prefiller.returned == ["1"]


@on_loop
async def test_without_a_wish_as_many_tokens_are_asked_for_as_fit(tmp_path: Path) -> None:
    async with fleet(tmp_path) as around:
        around.decoder.stops_after = 1
        await answer_to(around.dispatcher, generation(max_tokens=None))
        assert (await around.decoder.hears(Generate)).max_tokens == 512 - len(A_PROMPT)


# ---- what is refused ---------------------------------------------------------------------------------------------


@on_loop
async def test_what_never_fits_is_refused_before_anybody_is_asked(tmp_path: Path) -> None:
    async with fleet(tmp_path) as around:
        with pytest.raises(InputError, match="max_tokens: must be at most 472, is 473") as refused:
            await progress_of(around.dispatcher, generation(max_tokens=473))
        assert refused.value.field == "max_tokens"
        assert around.prefiller.all_heard(Reserve) == [] and around.decoder.all_heard(Generate) == []


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"sampling": Sampling(temperature=1e9)}, "temperature"),
        ({"sampling": Sampling(top_p=0.0)}, "top_p"),
        ({"sampling": Sampling(seed=2**70)}, "request"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"token_ids": (1, -1)}, "prompt"),
        ({"token_ids": ()}, "prompt"),
        ({"request_id": "x" * 255}, "request_id"),
    ],
)
def test_what_no_instance_would_read_is_refused_by_name(tmp_path: Path, changes: dict[str, object], field: str) -> None:
    async def play() -> None:
        async with fleet(tmp_path, prefillers=0) as around:
            with pytest.raises(InputError) as refused:
                await progress_of(around.dispatcher, generation(**{"request_id": "request", **changes}))  # type: ignore[arg-type]
            assert refused.value.field == field
            assert around.decoder.all_heard(Generate) == []

    asyncio.run(play())


@on_loop
async def test_a_rejection_names_the_field_once(tmp_path: Path) -> None:
    async with fleet(tmp_path) as around:
        around.decoder.rejects = ("max_tokens", "max_tokens: must be at most 3, is 5")
        with pytest.raises(InputError) as refused:
            await progress_of(around.dispatcher, generation())
        assert (refused.value.field, str(refused.value)) == ("max_tokens", "max_tokens: must be at most 3, is 5")
        await around.prefiller.hears(ReturnLease)


@on_loop
async def test_without_a_decoder_nobody_is_let_in(tmp_path: Path) -> None:
    async with fleet(tmp_path, decoders=0) as around:
        assert not around.dispatcher.is_ready() and around.dispatcher.limits() is None
        with pytest.raises(Overloaded, match="no decoder is here") as refused:
            await progress_of(around.dispatcher, generation())
        assert refused.value.status == 503 and refused.value.retry_after_s > 0
        await around.add_decoder()
        await around.knows(2)
        assert around.dispatcher.is_ready()
        await is_answered(around.dispatcher, generation())


@on_loop
async def test_when_enough_wait_the_next_one_is_told_when_to_come_back(tmp_path: Path) -> None:
    async with fleet(tmp_path, max_queued=2) as around:
        around.decoder.max_running = 0
        waiting = [ask(around.dispatcher, generation(f"w{nth}")) for nth in range(2)]
        await until(lambda: sum(around.dispatcher.statistics().num_queued.values()) == 2)
        with pytest.raises(Overloaded, match="2 requests wait already, of at most 2") as refused:
            await progress_of(around.dispatcher, generation())
        assert refused.value.status == 429 and refused.value.retry_after_s >= 1
        around.decoder.max_running = 64
        await asyncio.gather(*waiting)


@on_loop
async def test_an_id_that_is_under_way_is_refused_and_disturbs_nobody(tmp_path: Path) -> None:
    async with fleet(tmp_path) as around:
        around.decoder.token_s = 0.02
        first = ask(around.dispatcher, generation())
        await around.decoder.hears(Generate)
        with pytest.raises(InputError, match="request_id: must be new"):
            await progress_of(around.dispatcher, generation())
        assert (await first)[0] == tokens_after(len(A_PROMPT), 5)
        await is_answered(around.dispatcher, generation())


# ---- the dispatcher itself ---------------------------------------------------------------------------------------


@on_loop
async def test_leaving_ends_what_runs_and_aborts_it_at_its_decoder(tmp_path: Path) -> None:
    decoder = None
    async with Dispatcher(options_in(tmp_path), QUICK) as dispatcher:
        decoder = ScriptedDecoder(dispatcher.endpoint)
        async with decoder:
            await until(dispatcher.is_ready)
            decoder.is_stalled = True
            asked = ask(dispatcher, generation())
            await until(lambda: bool(decoder.running))
            waiting = asyncio.create_task(dispatcher.wait_failed())
            await dispatcher.__aexit__(None, None, None)
            with pytest.raises(GenerationFailed, match="the gateway is stopping"):
                await asked
            await decoder.hears(Abort)
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert not dispatcher.is_ready()
            with pytest.raises(Overloaded, match="the gateway is stopping"):
                await progress_of(dispatcher, generation())
    assert not (tmp_path / "control.sock").exists()


@on_loop
async def test_an_error_in_its_loop_surfaces_and_ends_every_request(tmp_path: Path) -> None:
    dispatcher = await Dispatcher(options_in(tmp_path), QUICK).__aenter__()
    async with ScriptedDecoder(dispatcher.endpoint) as decoder:
        await until(dispatcher.is_ready)
        decoder.is_stalled = True
        asked = ask(dispatcher, generation())
        await until(lambda: bool(decoder.running))
        dispatcher._exchange.beat = lambda now: 1 / 0  # type: ignore[assignment,method-assign,return-value]
        with pytest.raises(ExceptionGroup) as failed:
            await dispatcher.wait_failed()
        assert isinstance(failed.value.exceptions[0], ZeroDivisionError)
        with pytest.raises(GenerationFailed, match="the gateway is stopping"):
            await asked
        with pytest.raises(ExceptionGroup):
            await dispatcher.__aexit__(None, None, None)


@on_loop
async def test_leaving_at_once_leaves_no_socket(tmp_path: Path) -> None:
    for _ in range(2):
        async with Dispatcher(options_in(tmp_path), QUICK) as dispatcher:
            path = tmp_path / "control.sock"
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert repr(dispatcher).startswith("Dispatcher(ipc://")


@on_loop
async def test_wrong_messages_are_dropped_counted_and_end_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with fleet(tmp_path) as around:
        around.decoder.say_bytes(b"not a message")
        around.decoder.say(Accepted(sender="f" * 32, request_id="request", uses_lease=False, cached_tokens=0))
        await until(lambda: around.dispatcher.statistics().num_dropped == {"malformed": 1, "sender": 1})
        await is_answered(around.dispatcher, generation())
    assert sum("dropped a message" in record.message for record in caplog.records) == 1


@on_loop
async def test_beats_go_to_all_who_are_here_and_decoders_hear_of_every_change(tmp_path: Path) -> None:
    async with fleet(tmp_path, prefillers=2) as around:
        await around.decoder.hears(Beat)
        await around.prefiller.die()
        await until(lambda: len(around.decoder.all_heard(Prefillers)[-1].prefillers) == 1)
        (left,) = around.decoder.all_heard(Prefillers)[-1].prefillers
        assert (left.uuid, left.fabric_address) == (around.prefillers[1].uuid, b"fabric")


@on_loop
async def test_an_instance_that_serves_something_else_is_turned_away_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        fleet(tmp_path) as around,
        ScriptedInstance(around.dispatcher.endpoint, "prefiller", fingerprint="other") as stranger,
    ):
        stranger.say(stranger.announce)
        await until(lambda: "turned away" in caplog.text)
        await asyncio.sleep(0.15)
        assert len(around.dispatcher.alive()) == 2
        turned = [record.getMessage() for record in caplog.records if "turned away" in record.message]
        assert turned == [
            f"prefiller {stranger.announce.name} is turned away: model fingerprint differs: ours 'f', theirs 'other'"
        ]


@on_loop
async def test_every_request_leaves_one_line_with_its_waterfall(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "headrace.gateway.dispatch.figures")
    async with fleet(tmp_path) as around:
        around.decoder.token_s = 0.02  # the prefiller's word is here first, as it is when tokens take time
        await is_answered(around.dispatcher, generation())
        (line,) = [
            record.getMessage() for record in caplog.records if record.name == "headrace.gateway.dispatch.figures"
        ]
        assert line.startswith("request: length; queue ")
        assert "prefiller queue 1.0 ms, prefill 2.0 ms, exposed transfer 2.0 ms, hand-over 1.0 ms" in line
        names = f"decoder {around.decoder.announce.name}, prefiller {around.prefiller.announce.name}"
        assert f"40 prompt tokens (2 cached), 5 tokens; {names}; predicted wait 0.0 ms, prefill 39.0 ms" in line


@on_loop
async def test_a_gateway_that_takes_over_the_endpoint_learns_who_is_there(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        async with fleet(tmp_path) as around:
            # They outlive the first gateway.
            await stack.enter_async_context(around.instances.pop_all())
        async with Dispatcher(options_in(tmp_path), QUICK) as dispatcher:
            await until(lambda: len(dispatcher.alive()) == 2)
            await is_answered(dispatcher, generation())
