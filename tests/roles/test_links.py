"""An instance's links, with the gateways that a test speaks for at their other ends."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from scripted_gateway import ScriptedGateway, until

from headrace.errors import InputError
from headrace.protocol.control import CONTROL_VERSION, Announce, Finished, GatewayMessage, Limits, Status, Waterfall
from headrace.roles import links as links_module
from headrace.roles.links import GatewayUuid, Links

UUID = "a" * 32


class Instance:
    """What it was told, in order."""

    def __init__(self, *endpoints: str) -> None:
        self.told: list[tuple[str, str]] = []
        self.links = Links(endpoints, announce=announce(), status=status, on_message=self.hear, on_lost=self.lose)

    def hear(self, gateway: GatewayUuid, message: GatewayMessage) -> None:
        self.told.append((gateway, type(message).__name__))

    def lose(self, gateway: GatewayUuid) -> None:
        self.told.append((gateway, "lost"))
        self.links.send(gateway, finished("the last"))


def announce() -> Announce:
    limits = Limits(max_model_len=8, pool_tokens=8, page_size=4, max_running=1)
    return Announce(
        sender=UUID,
        role="decoder",
        version=CONTROL_VERSION,
        name="decoder-0",
        model="tiny",
        fingerprint="f",
        limits=limits,
        tp=1,
        dp=1,
        fabric_address=b"",
        host="here",
        pid=1,
        started=1,
    )


def status() -> Status:
    return Status(
        sender=UUID,
        num_free_pages=1,
        num_running=0,
        num_waiting=0,
        num_queued_tokens=0,
        prefilling=None,
        num_interactive_tokens=0,
        decoding=None,
        is_draining=False,
        gauges={},
        counters={},
    )


def finished(request_id: str) -> Finished:
    return Finished(
        sender=UUID,
        request_id=request_id,
        reason="abort",
        text="",
        num_tokens=0,
        cached_tokens=0,
        waterfall=Waterfall(),
    )


@asynccontextmanager
async def running(instance: Instance) -> AsyncIterator[Instance]:
    with instance.links:
        task = asyncio.create_task(instance.links.run())
        try:
            yield instance
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "BEAT_S", 0.02)
    monkeypatch.setattr(links_module, "SILENCE_S", 0.3)


def endpoint(tmp_path: Path, name: str = "control") -> str:
    return f"ipc://{tmp_path}/{name}"


Opened = Callable[[str], ScriptedGateway]


def played(play: Callable[[Opened], Awaitable[None]]) -> None:
    """The gateways that it opens are closed, whatever happens."""

    async def bounded() -> None:
        async with asyncio.timeout(15), AsyncExitStack() as exits:

            def opened(endpoint: str) -> ScriptedGateway:
                gateway = ScriptedGateway(endpoint)
                exits.push_async_callback(gateway.close)
                return gateway

            await play(opened)

    asyncio.run(bounded())


def test_it_announces_itself_until_it_is_heard_then_says_how_it_stands(tmp_path: Path) -> None:
    async def play(opened: Opened) -> None:
        async with running(Instance(endpoint(tmp_path))) as instance:
            await asyncio.sleep(0.1)  # nobody is there yet
            gateway = opened(endpoint(tmp_path))
            await until(lambda: UUID in gateway.status, "a status")
            kinds = [type(message) for message in gateway.heard]
            assert kinds.index(Status) > kinds.index(Announce)
            assert Announce not in kinds[kinds.index(Status) + 1 :]
            assert repr(instance.links) == "Links(1 of 1 gateways)"
            assert instance.told == []  # a Beat is nobody's business

    played(play)


def test_a_silent_gateway_is_lost_once_and_hears_the_last_words_when_it_goes_on(tmp_path: Path) -> None:
    async def play(opened: Opened) -> None:
        gateway = opened(endpoint(tmp_path))
        async with running(Instance(endpoint(tmp_path))) as instance:
            await until(lambda: instance.links.num_known == 1, "they know each other")
            gateway.is_silent = True
            announced = len([message for message in gateway.heard if isinstance(message, Announce)])
            await until(lambda: instance.told == [(gateway.uuid, "lost")], "it is lost")
            await until(lambda: finished("the last") in gateway.heard, "the last word")
            instance.links.send(GatewayUuid(gateway.uuid), finished("nobody's"))
            await until(lambda: len([one for one in gateway.heard if isinstance(one, Announce)]) > announced, "anew")
            gateway.is_silent = False
            await until(lambda: instance.links.num_known == 1, "they know each other again")
            assert instance.told == [(gateway.uuid, "lost")]
            assert finished("nobody's") not in gateway.heard

    played(play)


def test_another_uuid_at_the_endpoint_takes_it_over(tmp_path: Path) -> None:
    async def play(opened: Opened) -> None:
        first = opened(endpoint(tmp_path))
        async with running(Instance(endpoint(tmp_path))) as instance:
            await until(lambda: instance.links.num_known == 1, "they know each other")
            await first.close()
            second = opened(endpoint(tmp_path))
            await until(lambda: UUID in second.announced, "it is announced there")
            await until(lambda: instance.told == [(first.uuid, "lost")], "the first is lost")
            instance.links.send(GatewayUuid(second.uuid), finished("for the second"))
            await until(lambda: finished("for the second") in second.heard, "it is told")

    played(play)


def test_strange_bytes_are_counted_and_what_follows_is_heard(tmp_path: Path) -> None:
    async def play(opened: Opened) -> None:
        gateway = opened(endpoint(tmp_path))
        async with running(Instance(endpoint(tmp_path))) as instance:
            await until(lambda: UUID in gateway.announced, "it is announced")
            gateway.say_bytes(UUID, b"\x00strange")
            gateway.name_prefillers(UUID)
            await until(lambda: instance.told == [(gateway.uuid, "Prefillers")], "it is heard")
            assert instance.links.num_strange_messages == 1

    played(play)


def test_several_gateways_hear_what_is_theirs_and_everybody_hears_goodbye(tmp_path: Path) -> None:
    async def play(opened: Opened) -> None:
        one, other = opened(endpoint(tmp_path, "1")), opened(endpoint(tmp_path, "2"))
        async with running(Instance(one.endpoint, other.endpoint, endpoint(tmp_path, "nobody"))) as instance:
            await until(lambda: instance.links.num_known == 2, "they know each other")
            instance.links.send(GatewayUuid(one.uuid), finished("one's"))
            instance.links.broadcast(finished("all's"))
            await until(lambda: all(finished("all's") in gateway.heard for gateway in (one, other)), "all are told")
            assert finished("one's") in one.heard and finished("one's") not in other.heard
        await until(lambda: all(UUID in gateway.said_goodbye for gateway in (one, other)), "goodbye")

    played(play)


def test_a_gateway_that_has_not_answered_yet_hears_goodbye_too(tmp_path: Path) -> None:
    async def play(opened: Opened) -> None:
        gateway = opened(endpoint(tmp_path))
        gateway.is_silent = True
        gateway.say = lambda uuid, message: None  # type: ignore[method-assign]
        async with running(Instance(endpoint(tmp_path))) as instance:
            await until(lambda: UUID in gateway.announced, "it is announced")
            assert instance.links.num_known == 0
        await until(lambda: UUID in gateway.said_goodbye, "goodbye")

    played(play)


@pytest.mark.parametrize("endpoints", [(), ("nowhere",), ("ipc:///" + 200 * "x",), ("http://127.0.0.1:80",)])
def test_endpoints_that_are_none_are_refused(endpoints: tuple[str, ...]) -> None:
    async def play(opened: Opened) -> None:
        with pytest.raises(InputError, match="gateway: must be") as refused:
            Instance(*endpoints)
        assert refused.value.field == "gateway"

    played(play)
