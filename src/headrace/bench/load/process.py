"""The client as a process of its own: `python -m headrace.bench.load.process ORDER.json`, pinned if it is asked to be.

It writes the records to the order's `out` when all requests are over, and meanwhile tells on stdout how many are, a
line each. `run_load` is its caller's side.
"""

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import uvloop

from headrace.bench.load.offering import offer
from headrace.bench.load.stream import Target
from headrace.bench.prompts import VOCABULARY
from headrace.bench.records import RequestRecord
from headrace.bench.workload import ArrivalList
from headrace.errors import HeadraceError


class Order(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is to be offered to whom. `cpus`: where the client may run; none: anywhere."""

    url: str
    model: str
    arrivals: ArrivalList
    out: str
    timeout_s: float
    cpus: tuple[int, ...] = ()
    headers: tuple[tuple[str, str], ...] = ()
    vocabulary: tuple[int, int] = VOCABULARY
    tells_token_ids: bool = True


class LoadFailed(HeadraceError):
    """The client ended without records."""


async def run_load(order: Order, folder: Path, on_end: Callable[[int], None]) -> tuple[RequestRecord, ...]:
    """Raises LoadFailed. Cancelled, the client has ended."""
    file = folder / "order.json"
    file.write_bytes(msgspec.json.encode(order))
    words = (sys.executable, "-P", "-m", "headrace.bench.load.process", str(file))
    client = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
    assert client.stdout is not None
    try:
        async for line in client.stdout:
            on_end(int(line))
        status = await client.wait()
    finally:
        if client.returncode is None:
            client.kill()
            await client.wait()
    if status != 0:
        raise LoadFailed(f"the load client ended with status {status}")
    return msgspec.json.decode(Path(order.out).read_bytes(), type=tuple[RequestRecord, ...])


def main() -> None:
    order = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Order)
    if order.cpus:
        os.sched_setaffinity(0, order.cpus)
    records = uvloop.run(
        offer(
            order.arrivals,
            Target(order.url, order.model, headers=order.headers),
            timeout_s=order.timeout_s,
            vocabulary=order.vocabulary,
            tells_token_ids=order.tells_token_ids,
            on_end=_tell,
        )
    )
    Path(order.out).write_bytes(msgspec.json.encode(records))


def _tell(num_ended: int) -> None:
    sys.stdout.write(f"{num_ended}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
