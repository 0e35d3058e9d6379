"""The gateway alone, on one core: requests/s at one token each, and streamed tokens/s, before an engine that is none.

The gateway is its real process, with the built-in model's tokenizer and template, pinned to one core. On the other core
are the stub engine (a prefiller and a decoder that answer at once) and the load: keep-alive connections that ask again
as soon as they are answered. The first row has a server in the gateway's place that sends one fixed answer: what the
load itself can do.

    requests    prompts of some 30 tokens, one token each; `--connections` at once
    streams     `--streams` at once, 128 tokens each, one event a token; the engine's steps give `--rate` tokens/s

Beside each rate is the gateway process's CPU time (user and system, all its threads) for a request or a token, and the
rate that a whole core of that would give: on a machine with neighbours that is the steadier figure. Clock:
`time.monotonic` at the client, from the request's write to its answer's last byte; gaps between a stream's reads.

    python benchmarks/gateway_alone.py [--runs 5] [--seconds 3] [--core 1] [--profile]
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self, cast

import uvloop
from _deployment import free_port
from _endpoint import positive
from _figures import Conditions, spread
from _stub_engine import StubEngine

from headrace.bench.metrics import percentile
from headrace.model.builtin import BUILTIN_NAME

STREAM_TOKENS = 128
START_S = 30.0
WARM_UP_S = 0.5
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


# ---- the load --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Workload:
    name: str
    path: str
    max_tokens: int
    stream: bool

    def requests(self) -> list[bytes]:
        """Ready to send; prompts differ, as prompts do."""
        return [self._request(number) for number in range(64)]

    def _request(self, number: int) -> bytes:
        text = f"{number} boats wait below the weir. How long will it take them to pass, one by one, if each needs"
        body = {"model": BUILTIN_NAME, "max_tokens": self.max_tokens, "temperature": 0, "ignore_eos": True}
        asked = {"prompt": text} if "chat" not in self.path else {"messages": [{"role": "user", "content": text}]}
        options = {"stream": True, "stream_options": {"include_usage": True}} if self.stream else {}
        payload = json.dumps({**body, **asked, **options}).encode()
        head = f"POST {self.path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload


REQUESTS = [
    Workload(name="completions", path="/v1/completions", max_tokens=1, stream=False),
    Workload(name="chat", path="/v1/chat/completions", max_tokens=1, stream=False),
    Workload(name="chat, streamed", path="/v1/chat/completions", max_tokens=1, stream=True),
]
STREAMS = [
    Workload(name="streams, completions", path="/v1/completions", max_tokens=STREAM_TOKENS, stream=True),
    Workload(name="streams, chat", path="/v1/chat/completions", max_tokens=STREAM_TOKENS, stream=True),
]


@dataclass
class Seen:
    """What came back between two moments. `num_tokens`: events of streams, which have one each."""

    num_requests: int = 0
    num_tokens: int = 0
    latencies_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)

    def clear(self) -> None:
        self.__init__()  # type: ignore[misc]


class Connection(asyncio.Protocol):
    """Asks, reads the answer to its end, asks again. An answer that is no success ends the benchmark."""

    def __init__(
        self, workload: Workload, requests: Sequence[bytes], seen: Seen, failed: "asyncio.Future[None]"
    ) -> None:
        self._workload = workload
        self._requests = requests
        self._nth = id(self) % len(requests)
        self._seen = seen
        self._failed = failed
        self._is_whole = _stream_is_whole if workload.stream else _answer_is_whole
        self._answer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._ask()

    def _ask(self) -> None:
        self._nth = (self._nth + 1) % len(self._requests)
        self._asked = self._read = time.monotonic()
        self._answer = b""
        self._transport.write(self._requests[self._nth])

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        if self._answer:
            self._seen.gaps_s.append(now - self._read)
        self._read = now
        self._answer += data
        self._seen.num_tokens += data.count(b'"finish_reason":null')
        if self._is_whole(self._answer):
            self._answered(now)

    def _answered(self, now: float) -> None:
        told = b'"completion_tokens":%d,' % self._workload.max_tokens
        if not self._answer.startswith(b"HTTP/1.1 200") or told not in self._answer:
            self._fail(f"{self._workload.name}: {self._answer.decode(errors='replace')[-2000:]}")
            return
        self._seen.num_requests += 1
        self._seen.latencies_s.append(now - self._asked)
        self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"a connection was lost: {exc}")

    def _fail(self, text: str) -> None:
        if not self._failed.done():
            self._failed.set_exception(SystemExit(text))

    def close(self) -> None:
        if not self._failed.done():
            self._failed.set_result(None)
        self._transport.abort()


def _stream_is_whole(answer: bytes) -> bool:
    return answer.endswith(b"0\r\n\r\n")


def _answer_is_whole(answer: bytes) -> bool:
    head, found, body = answer.partition(b"\r\n\r\n")
    return bool(found) and len(body) == int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0])


# ---- servers ---------------------------------------------------------------------------------------------------


class Server:
    """A process on one core: the gateway, or what stands in for it. `samples` is where a sampled one tells them."""

    def __init__(self, core: str, folder: Path, *, profile: bool = False) -> None:
        self.port = free_port()
        self.control = f"ipc://{folder}/control.sock"
        self.samples = folder / "samples"
        program = [str(Path(__file__).with_name("_sampled.py")), str(self.samples)] if profile else ["-m", "headrace"]
        words = ["gateway", "--control", self.control, "--port", str(self.port), "--model", BUILTIN_NAME]
        self._start([*program, *words, "--log-level", "warning"], core)

    def _start(self, words: Sequence[str], core: str) -> None:
        self._process = subprocess.Popen(["taskset", "-c", core, sys.executable, *words], stdin=subprocess.DEVNULL)

    @property
    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * TICK_S

    @property
    def io_thread_s(self) -> float:
        """Of that, ZeroMQ's own threads."""
        threads = [Path(task, "stat").read_text() for task in Path(f"/proc/{self._process.pid}/task").iterdir()]
        told = [stat.rpartition(")")[2].split() for stat in threads if "(ZMQbg" in stat]
        return sum(int(fields[11]) + int(fields[12]) for fields in told) * TICK_S

    def begin_samples(self) -> None:
        self._process.send_signal(signal.SIGUSR1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(10)

    async def ready(self) -> None:
        """It serves: its instances are there."""
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            if await self._health() == 200:
                return
            await asyncio.sleep(0.1)
        raise SystemExit(f"not ready after {START_S:.0f} s")

    async def _health(self) -> int:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n")
            answer = await reader.readline()
            writer.close()
        except OSError:
            return 0
        return int(answer.split()[1])


class FixedServer(Server):
    """Sends one answer to whatever comes: this file, run as `gateway_alone.py --fixed PORT`."""

    def __init__(self, core: str) -> None:
        self.port = free_port()
        self._start([__file__, "--fixed", str(self.port)], core)


class FixedAnswer(asyncio.Protocol):
    body = b'{"usage":{"completion_tokens":1,"total":1}}'
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._transport.write(self.answer)


async def serve_fixed(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(FixedAnswer, "127.0.0.1", port)
    await server.serve_forever()


# ---- measuring -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of one run. `rate` and `cpu_us` are of requests, or of tokens."""

    rate: float
    cpu_us: float
    p50_s: float
    p99_s: float


async def measure(server: Server, workload: Workload, num_connections: int, seconds: float) -> Figures:
    loop = asyncio.get_running_loop()
    failed: asyncio.Future[None] = loop.create_future()
    seen, requests = Seen(), workload.requests()
    connections = [
        (await loop.create_connection(lambda: Connection(workload, requests, seen, failed), "127.0.0.1", server.port))[
            1
        ]
        for _ in range(num_connections)
    ]
    await asyncio.wait([failed], timeout=WARM_UP_S)
    seen.clear()
    begin, cpu_s = time.monotonic(), server.cpu_s
    await asyncio.wait([failed], timeout=seconds)
    wall_s, cpu_s = time.monotonic() - begin, server.cpu_s - cpu_s
    for connection in connections:
        connection.close()
    failed.result()
    is_stream = workload.max_tokens > 1
    count, times = (seen.num_tokens, seen.gaps_s) if is_stream else (seen.num_requests, seen.latencies_s)
    if not count:
        raise SystemExit(f"{workload.name}: nothing was answered within {seconds} s")
    return Figures(
        rate=count / wall_s,
        cpu_us=cpu_s / count * 1e6,
        p50_s=percentile(times, 0.5),
        p99_s=percentile(times, 0.99),
    )


async def run(arguments: argparse.Namespace) -> None:
    workloads = [w for w in (*REQUESTS, *STREAMS) if arguments.only in w.name]
    print(f"{'':22} {'each second':>26} {'us of CPU':>22} {'a core':>9} {'p50, ms':>8} {'p99, ms':>8}")
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        os.chmod(folder, 0o700)
        if not arguments.profile:
            with FixedServer(arguments.core) as fixed:
                await fixed.ready()
                show("a fixed answer", [await measure(fixed, REQUESTS[0], arguments.connections, arguments.seconds)])
            with Server(arguments.core, Path(folder)) as gateway, StubEngine(gateway.control, BUILTIN_NAME) as engine:
                await gateway.ready()
                await measure_all(gateway, engine, workloads, arguments)
        for workload in workloads if arguments.profile else []:
            gateway = Server(arguments.core, Path(folder), profile=True)
            with gateway, StubEngine(gateway.control, BUILTIN_NAME) as engine:
                await gateway.ready()
                gateway.begin_samples()
                found = await measure_all(gateway, engine, [workload], arguments)
                io_share = gateway.io_thread_s / gateway.cpu_s
            show_samples(
                json.loads(gateway.samples.read_text()), statistics.median(one.cpu_us for one in found), io_share
            )


async def measure_all(
    gateway: Server, engine: StubEngine, workloads: Sequence[Workload], arguments: argparse.Namespace
) -> list[Figures]:
    """-> those of the last one."""
    found: list[Figures] = []
    for workload in workloads:
        is_stream = workload.max_tokens > 1
        engine.step_s = arguments.streams / arguments.rate if is_stream else 0.0
        num = arguments.streams if is_stream else arguments.connections
        found = [await measure(gateway, workload, num, arguments.seconds) for _ in range(arguments.runs)]
        show(workload.name, found)
    return found


def show(name: str, found: Sequence[Figures]) -> None:
    rate, cpu_us = spread([one.rate for one in found], 0), spread([one.cpu_us for one in found], 1)
    core = 1e6 / statistics.median(one.cpu_us for one in found)
    p50, p99 = (1e3 * statistics.median(values) for values in zip(*((o.p50_s, o.p99_s) for o in found), strict=True))
    print(f"{name:22} {rate:>26} {cpu_us:>22} {core:9,.0f} {p50:8.1f} {p99:8.1f}", flush=True)


def show_samples(told: dict[str, list[tuple[str, int]]], cpu_us: float, io_share: float) -> None:
    """Shares of the main thread's samples, as parts of `cpu_us`."""
    total = sum(count for _, count in told["parts"])
    print(f"  {total} samples; ZeroMQ's own thread {100 * io_share:.0f} % of the process")
    for part, count in told["parts"]:
        print(f"  {part:26} {100 * count / total:5.1f} % {cpu_us * count / total:8.1f} us")
    print("  innermost lines:")
    for place, count in told["places"][:25]:
        print(f"    {100 * count / total:5.1f} % {place}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=positive, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each run")
    parser.add_argument("--core", default="1", help="the gateway's; engine and load have another")
    parser.add_argument("--other-core", default="0", help="theirs")
    parser.add_argument("--connections", type=positive, default=32)
    parser.add_argument("--streams", type=positive, default=64)
    parser.add_argument("--rate", type=positive, default=10_000, help="tokens/s that the stub engine gives")
    parser.add_argument("--only", default="", help="rows whose names have this in them")
    parser.add_argument("--profile", action="store_true", help="where the gateway's time goes, row by row")
    parser.add_argument("--fixed", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.fixed is not None:
        uvloop.run(serve_fixed(arguments.fixed))
        return
    os.sched_setaffinity(0, {int(arguments.other_core)})
    conditions = Conditions(
        f"the gateway alone on core {arguments.core}, {arguments.runs} runs of {arguments.seconds} s"
    )
    uvloop.run(run(arguments))
    conditions.end()


if __name__ == "__main__":
    main()
