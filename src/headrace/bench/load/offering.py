"""All of an arrival list, offered to one server: each request at its time. Runs on the client's own loop."""

import asyncio
import ssl
import time
from collections.abc import Callable, Sequence

from headrace.bench.load.stream import Stream, Target
from headrace.bench.prompts import VOCABULARY, prompt_ids
from headrace.bench.records import RequestRecord
from headrace.bench.workload import ArrivalList

START_S = 0.05
"""From the first look at the clock to the list's begin: for the loop to be where it waits."""

Ended = Callable[[int], None]


async def offer(
    arrivals: ArrivalList,
    target: Target,
    *,
    timeout_s: float,
    vocabulary: tuple[int, int] = VOCABULARY,
    tells_token_ids: bool = True,
    on_end: Ended = lambda num_ended: None,
) -> tuple[RequestRecord, ...]:
    """What came of each, when all are over; none takes longer than `timeout_s`. Prompts are made and encoded before
    the first is due. `tells_token_ids`: the server knows `return_token_ids`."""
    fields = {"return_token_ids": True} if tells_token_ids else {}
    requests = [
        target.request(prompt_ids(arrivals, index, vocabulary), one.max_tokens, **fields)
        for index, one in enumerate(arrivals.arrivals)
    ]
    origin_s = time.monotonic() + START_S
    records: list[RequestRecord | None] = [None] * len(requests)
    num_ended = 0

    async def ask(index: int) -> None:
        nonlocal num_ended
        one = arrivals.arrivals[index]
        stream = await _asked(target, requests[index], timeout_s)
        records[index] = RequestRecord(
            index=index,
            id=stream.id,
            arrival_s=one.at_s,
            sent_s=stream.sent_s - origin_s,
            prompt_tokens=one.prompt_tokens,
            max_tokens=one.max_tokens,
            token_s=tuple(at_s - origin_s for at_s in stream.token_s),
            num_reported=stream.num_reported,
            cached_tokens=stream.cached_tokens,
            error=stream.error,
            tier=one.tier,
        )
        num_ended += 1
        on_end(num_ended)

    async with asyncio.TaskGroup() as group:
        for index, one in enumerate(arrivals.arrivals):
            await asyncio.sleep(max(0.0, origin_s + one.at_s - time.monotonic()))
            group.create_task(ask(index))
    return _all(records)


async def _asked(target: Target, request: bytes, timeout_s: float) -> Stream:
    """Over, whatever came of it."""
    loop = asyncio.get_running_loop()
    host, port, is_tls = target.address
    stream = Stream(request)
    stream.sent_s = time.monotonic()  # of one that gets no connection
    try:
        async with asyncio.timeout(timeout_s):
            context = ssl.create_default_context() if is_tls else None
            await loop.create_connection(lambda: stream, host, port, ssl=context)
            await stream.over
    except TimeoutError:  # before OSError, which it is too
        stream.error = f"not over after {timeout_s:g} s"
    except OSError as error:
        stream.error = f"no connection to {host}:{port}: {error}"
    stream.close()
    return stream


def _all(records: Sequence[RequestRecord | None]) -> tuple[RequestRecord, ...]:
    whole = tuple(record for record in records if record is not None)
    assert len(whole) == len(records), "a request ended without a record"
    return whole
