"""The client against a server that is scripted here, over real sockets."""

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import pytest

from headrace.bench.load.judging import judge_run
from headrace.bench.load.offering import offer
from headrace.bench.load.process import LoadFailed, Order, run_load
from headrace.bench.load.stream import Target
from headrace.bench.prompts import prompt_ids
from headrace.bench.records import RequestRecord
from headrace.bench.workload import Arrival, ArrivalList
from headrace.errors import InputError

HEAD = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = "data: [DONE]\n\n"


def event(num_tokens: int | None = 1, **fields: object) -> str:
    choice = {"index": 0, "text": "x", **({} if num_tokens is None else {"token_ids": [5] * num_tokens})}
    told = {"id": "cmpl-7", "choices": [choice], **fields}
    return f"data: {msgspec.json.encode(told).decode()}\n\n"


def usage(num_tokens: int, cached: int = 0) -> str:
    told = {"completion_tokens": num_tokens, "prompt_tokens_details": {"cached_tokens": cached}}
    return f"data: {msgspec.json.encode({'id': 'cmpl-7', 'choices': [], 'usage': told}).decode()}\n\n"


def a_list(*times: float, max_tokens: int = 2) -> ArrivalList:
    arrivals = tuple(Arrival(at_s=at_s, prompt_tokens=8, max_tokens=max_tokens) for at_s in times)
    return ArrivalList(name="some", seed=1, arrivals=arrivals)


class Scripted:
    """Answers every request with the same pieces, each a chunk of its own, `pause_s` apart; keeps what was asked."""

    def __init__(self, pieces: Sequence[str], *, head: str = HEAD, pause_s: float = 0.0, ends: bool = True) -> None:
        self.bodies: list[dict[str, object]] = []
        self._pieces, self._head, self._pause_s, self._ends = pieces, head, pause_s, ends

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().partition("content-length:")[2].split("\r\n", 1)[0])
        self.bodies.append(msgspec.json.decode(await reader.readexactly(length)))
        writer.write(self._head.encode())
        for piece in self._pieces:
            with suppress(asyncio.CancelledError):  # the loop ends while it still sleeps
                await asyncio.sleep(self._pause_s)
            writer.write(
                f"{len(piece.encode()):x}\r\n{piece}\r\n".encode() if "chunked" in self._head else piece.encode()
            )
            await writer.drain()
        if self._ends and "chunked" in self._head:
            writer.write(b"0\r\n\r\n")
        writer.close()


@asynccontextmanager
async def serving(script: Scripted) -> AsyncIterator[str]:
    server = await asyncio.start_server(script.answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def offered(script: Scripted, arrivals: ArrivalList, timeout_s: float = 5.0) -> tuple[RequestRecord, ...]:
    async def run() -> tuple[RequestRecord, ...]:
        async with serving(script) as url:
            return await offer(arrivals, Target(url, "mill"), timeout_s=timeout_s)

    return asyncio.run(run())


def test_tokens_are_timed_as_their_bytes_come() -> None:
    script = Scripted([event(), event(), usage(2, cached=3), DONE], pause_s=0.03)
    arrivals = a_list(0.0, 0.2)
    first, second = offered(script, arrivals)
    for record, at_s in ((first, 0.0), (second, 0.2)):
        assert record.error is None and record.id == "cmpl-7" and (record.num_reported, record.cached_tokens) == (2, 3)
        assert record.arrival_s == at_s and at_s <= record.sent_s < at_s + 0.15
        early, late = record.token_s
        assert early - record.sent_s > 0.02 and late - early > 0.02
    assert judge_run(arrivals, (first, second)) == []
    asked = script.bodies[0]
    assert asked["prompt"] == prompt_ids(arrivals, 0) and asked["max_tokens"] == 2 and asked["ignore_eos"] is True


def test_nobody_waits_for_those_before_him() -> None:
    first, second = offered(Scripted([event(2), usage(2), DONE], pause_s=0.15), a_list(0.0, 0.05))
    assert second.sent_s < first.token_s[0]


def test_an_event_that_is_cut_anywhere_is_still_one() -> None:
    whole = event() + event() + usage(2) + DONE
    pieces = [whole[begin : begin + 7] for begin in range(0, len(whole), 7)]
    (record,) = offered(Scripted(pieces), a_list(0.0))
    assert record.error is None and len(record.token_s) == 2


def test_a_server_that_tells_no_tokens_sends_one_an_event() -> None:
    last = 'data: {"choices": [{"text": "", "finish_reason": "length"}]}\n\n'
    (record,) = offered(Scripted([event(None), event(None), last, usage(2), DONE]), a_list(0.0))
    assert len(record.token_s) == 2 and record.error is None


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (Scripted(['{"error": "busy"}'], head="HTTP/1.1 429 No\r\ncontent-length: 17\r\n\r\n"), "HTTP 429: .*busy"),
        (Scripted([event(), 'data: {"error": {"message": "lost"}}\n\n', DONE]), "lost"),
        (Scripted([event()]), r"its stream ended without \[DONE\]"),
        (Scripted([event()], ends=False), "the connection broke"),
        (Scripted(["data: {nonsense}\n\n", DONE]), "its answer cannot be read"),
        (Scripted([], head="SSH-2.0-hello\r\n"), "its answer cannot be read"),
        (Scripted([event(), event(), DONE], pause_s=3.0), "not over after 0.3 s"),
    ],
)
def test_whatever_goes_wrong_is_told_of_its_request(script: Scripted, said: str) -> None:
    (record,) = offered(script, a_list(0.0), timeout_s=0.3)
    assert record.error is not None and re.search(said, record.error), record.error


def test_where_nobody_listens_every_request_says_so() -> None:
    (record,) = asyncio.run(offer(a_list(0.0), Target("http://127.0.0.1:1", "mill"), timeout_s=2.0))
    assert record.error is not None and record.error.startswith("no connection to 127.0.0.1:1")


@pytest.mark.parametrize("url", ["127.0.0.1:80", "ftp://there", "http://"])
def test_an_address_must_be_one(url: str) -> None:
    with pytest.raises(InputError, match="must be an address such as"):
        Target(url, "mill")


def test_a_base_address_may_have_its_version_or_not() -> None:
    for url in ("http://there:1/base", "http://there:1/base/v1/"):
        assert (
            Target(url, "mill").request([1], 1).startswith(b"POST /base/v1/completions HTTP/1.1\r\nHost: there:1\r\n")
        )


def test_as_a_process_it_gives_the_same_records_and_tells_how_far_it_is(tmp_path: Path) -> None:
    ends: list[int] = []

    async def run() -> tuple[RequestRecord, ...]:
        async with serving(Scripted([event(), event(), usage(2), DONE])) as url:
            order = Order(
                url=url,
                model="mill",
                arrivals=a_list(0.0, 0.05),
                out=str(tmp_path / "out.json"),
                timeout_s=5.0,
                cpus=(0,),
            )
            return await run_load(order, tmp_path, ends.append)

    records = asyncio.run(run())
    assert [len(record.token_s) for record in records] == [2, 2] and ends == [1, 2]


def test_a_client_that_ends_without_records_is_an_error(tmp_path: Path) -> None:
    order = Order(url="ftp://", model="mill", arrivals=a_list(0.0), out=str(tmp_path / "out.json"), timeout_s=5.0)
    with pytest.raises(LoadFailed, match="ended with status 1"):
        asyncio.run(run_load(order, tmp_path, lambda num: None))


# ---- what is wrong with a run itself ---------------------------------------------------------------------------


def record(index: int, **changes: object) -> RequestRecord:
    plain = RequestRecord(
        index=index,
        arrival_s=float(index),
        sent_s=float(index),
        prompt_tokens=8,
        max_tokens=2,
        token_s=(index + 0.1, index + 0.2),
        num_reported=2,
    )
    return msgspec.structs.replace(plain, **changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sent_s": 1.2}, "the client was late"),
        ({"token_s": (1.0, 1.1)}, "1 first tokens came no later than their request, the first of 1"),
        (
            {"token_s": (1.1,), "num_reported": 1},
            "another number of tokens than was asked for: 1 of 2 tokens of request 1",
        ),
        ({"num_reported": 3}, "tell another number of tokens than came: 3 told, 2 seen of request 1"),
        ({"index": 5}, "2 records of 2 requests"),
    ],
)
def test_a_run_that_is_no_measurement_fails_itself(changes: dict[str, object], said: str) -> None:
    reasons = judge_run(a_list(0.0, 1.0), [record(0), msgspec.structs.replace(record(1), **changes)])
    assert len(reasons) == 1 and said in reasons[0]


def test_a_request_that_failed_is_a_miss_and_no_reason() -> None:
    assert judge_run(a_list(0.0, 1.0), [record(0), record(1, error="HTTP 429", token_s=())]) == []
