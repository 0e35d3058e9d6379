"""Bodies up to a limit, clients that leave at any moment, and the gateway's own end."""

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from http_front import MODEL, Front, a_front, make_intake
from scripted_dispatch import tokens
from starlette.types import Message

from headrace.gateway.generation import Progress
from headrace.gateway.intake import Intake
from headrace.gateway.vocabulary import Vocabulary


@pytest.fixture(scope="module")
def intake(tmp_path_factory: pytest.TempPathFactory) -> Intake:
    return make_intake(tmp_path_factory.mktemp("model"))


@pytest.fixture
def front(intake: Intake) -> Iterator[Front]:
    with a_front(intake) as front:
        yield front


@dataclass
class Client:
    """One request by hand: what it sends, message for message, and what it gets."""

    sends: list[Message]
    num_told: int | None = None  # content-length
    gets: list[Message] = field(default_factory=list)
    left: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    def asking(cls, **body: Any) -> "Client":
        content = json.dumps({"model": MODEL, "prompt": "x", **body}).encode()
        return cls([{"type": "http.request", "body": content, "more_body": False}])

    @property
    def status(self) -> int | None:
        return self.gets[0]["status"] if self.gets else None

    @property
    def body(self) -> str:
        return b"".join(message.get("body", b"") for message in self.gets).decode()

    async def call(self, front: Front, path: str = "/v1/completions") -> None:
        headers = [] if self.num_told is None else [(b"content-length", str(self.num_told).encode())]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
        await front.app(scope, self._receive, self._send)

    async def _receive(self) -> Message:
        if self.sends:
            return self.sends.pop(0)
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self.gets.append(message)


async def until(happened: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not happened():
            await asyncio.sleep(0)


# ---- bodies that are too large ---------------------------------------------------------------------------------


def test_a_body_that_says_it_is_too_large_is_refused_unread(front: Front) -> None:
    client = Client([{"type": "http.request", "body": b"x", "more_body": True}], num_told=10 * 2**20 + 1)
    front.runner.run(client.call(front))
    error = json.loads(client.body)["error"]
    assert (client.status, error["param"], error["code"]) == (413, "body", "request_too_large")
    assert len(client.sends) == 1


def test_a_body_that_does_not_say_how_large_it_is_is_read_up_to_the_limit(front: Front) -> None:
    client = Client([{"type": "http.request", "body": b"x" * 2**20, "more_body": True}] * 1000)
    front.runner.run(client.call(front, "/v1/completions"))
    assert client.status == 413
    assert len(client.sends) > 1000 - 12


def test_a_body_that_does_not_arrive_is_not_waited_for(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.gateway.connection.BODY_PATIENCE_S", 0.01)
    client = Client([{"type": "http.request", "body": b"{", "more_body": True}])
    front.runner.run(client.call(front))
    assert client.status == 408 and "must arrive within" in client.body


def test_bodies_of_many_clients_together_take_no_more_than_their_room(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.gateway.connection.MAX_BODIES_BYTES", 100)

    async def scenario() -> None:
        slow = [Client([{"type": "http.request", "body": b"x" * 40, "more_body": True}]) for _ in range(2)]
        calls = [asyncio.create_task(client.call(front)) for client in slow]
        await until(lambda: not any(client.sends for client in slow))
        third = Client.asking(prompt="y" * 10)
        await third.call(front)
        assert third.status == 429 and dict(third.gets[0]["headers"])[b"retry-after"] == b"1"
        slow[0].left.set()  # and its bytes are gone
        await calls[0]
        front.says("back")
        again = Client.asking()
        await again.call(front)
        assert again.status == 200
        slow[1].left.set()
        await calls[1]

    front.runner.run(scenario())


# ---- clients that leave, and the end ---------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("first", [[], [Progress(token_ids=(50,))]])
def test_a_client_that_leaves_ends_its_generations_at_once(front: Front, stream: bool, first: list[Any]) -> None:
    async def scenario() -> None:
        never = asyncio.Event()
        front.dispatch.script = lambda _: [*first, never]
        client = Client.asking(n=3, stream=stream)
        call = asyncio.create_task(client.call(front))
        await until(lambda: len(front.dispatch.running) == 3)
        client.left.set()
        await call
        assert front.dispatch.running == set() and len(front.dispatch.aborted) == 3
        assert "[DONE]" not in client.body

    front.runner.run(scenario())


def test_a_client_that_leaves_before_its_body_is_there_asks_for_nothing(front: Front) -> None:
    async def scenario() -> None:
        client = Client([{"type": "http.request", "body": b'{"model"', "more_body": True}])
        client.left.set()
        await client.call(front)

    front.runner.run(scenario())
    assert front.dispatch.asked == []


def test_a_long_prompt_of_a_client_that_has_left_is_not_tokenised(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Vocabulary, "encode", None)
    client = Client.asking(prompt="the mill " * 1000)
    client.left.set()
    front.runner.run(client.call(front))
    assert client.status == 499


@pytest.mark.parametrize("stream", [False, True])
def test_a_cancelled_request_aborts_its_generations(front: Front, stream: bool) -> None:
    async def scenario() -> None:
        never = asyncio.Event()
        front.dispatch.script = lambda _: [never]
        call = asyncio.create_task(Client.asking(n=2, stream=stream).call(front))
        await until(lambda: len(front.dispatch.running) == 2)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert len(front.dispatch.aborted) == 2

    front.runner.run(scenario())


def test_a_client_that_reads_no_more_is_given_up_after_its_deadline(
    intake: Intake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.gateway.app.DELIVERY_S", 0.0)
    monkeypatch.setattr("headrace.gateway.answers.LAST_WORD_S", 0.01)

    class Stuck(Client):
        async def _send(self, message: Message) -> None:
            await asyncio.Event().wait()

    async def scenario() -> None:
        async with asyncio.timeout(5):
            await Stuck.asking(stream=True).call(front)
        assert len(front.dispatch.aborted) == 1

    with a_front(intake, lambda _: tokens([50] * 100), deadline_s=0.01) as front:
        front.runner.run(scenario())


def test_at_the_end_what_still_runs_is_told_so(front: Front) -> None:
    async def scenario() -> None:
        never = asyncio.Event()
        front.dispatch.script = lambda _: [Progress(token_ids=(50,)), never]
        streamed, whole = Client.asking(stream=True), Client.asking()
        calls = [asyncio.create_task(client.call(front)) for client in (streamed, whole)]
        await until(lambda: len(front.dispatch.running) == 2 and streamed.gets)
        front.closing.set()
        await asyncio.gather(*calls)
        assert len(front.dispatch.aborted) == 2
        assert whole.status == 503 and "shutting down" in whole.body
        *_, error, done, rest = streamed.body.split("\n\n")
        assert "shutting down" in error and (done, rest) == ("data: [DONE]", "")

    front.runner.run(scenario())


def test_a_client_that_leaves_as_its_answer_is_done_troubles_nobody(
    front: Front, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        done = asyncio.Event()
        front.dispatch.script = lambda _: [done, Progress(token_ids=(50,), finish_reason="length", num_tokens=1)]
        client = Client.asking()
        call = asyncio.create_task(client.call(front))
        await until(lambda: front.dispatch.running)
        await asyncio.sleep(0)
        client.left.set()
        done.set()
        await call
        assert client.status == 200
        await asyncio.sleep(0)

    front.runner.run(scenario())
    assert caplog.records == []


def test_a_mistake_of_ours_is_answered_and_left_to_the_server_to_log(front: Front) -> None:
    front.dispatch.script = lambda _: [KeyError("secret")]
    client = Client.asking()
    with pytest.raises(KeyError, match="secret"):
        front.runner.run(client.call(front))
    assert client.status == 500 and "internal error" in client.body and "secret" not in client.body
