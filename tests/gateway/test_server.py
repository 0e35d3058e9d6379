"""The gateway's process: its port, its signals, its end."""

import asyncio
import json
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from http_front import Front, a_front, make_intake
from scripted_dispatch import Step
from tiny_vocabulary import byte_level_tokenizer, write_model

from headrace.errors import InputError
from headrace.gateway.generation import Generation, Progress
from headrace.gateway.listening import bind
from headrace.gateway.options import GatewayOptions
from headrace.gateway.server import MOST_HEAD_BYTES, make_server, run_gateway, take_all_descriptors, url_of

PROGRAM = Path(__file__).with_name("gateway_process.py")
MODEL = "mill"


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), byte_level_tokenizer(), eos="<|im_end|>")


class Gateway:
    """A running one."""

    def __init__(self, model_directory: Path, directory: Path, behaviour: str) -> None:
        command = [sys.executable, str(PROGRAM), str(model_directory), str(directory), behaviour]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self._file = directory / "port"
        self._client = httpx2.Client(timeout=10)

    @property
    def url(self) -> str:
        deadline = time.monotonic() + 30
        while not self._file.exists():
            assert self.process.poll() is None and time.monotonic() < deadline, "the gateway did not start"
            time.sleep(0.01)
        return f"http://127.0.0.1:{self._file.read_text()}"

    def get(self, path: str) -> httpx2.Response:
        return self._client.get(self.url + path)

    def post(self, **fields: Any) -> httpx2.Response:
        return self._client.post(f"{self.url}/v1/completions", json={"model": MODEL, "prompt": "x", **fields})

    def lines(self, **fields: Any) -> Iterator[str]:
        """The events of a stream, as they come."""
        body = {"model": MODEL, "prompt": "x", "stream": True, **fields}
        with self._client.stream("POST", f"{self.url}/v1/completions", json=body) as response:
            yield from (line.removeprefix("data: ") for line in response.iter_lines() if line)

    def ended(self, within_s: float) -> tuple[int, str]:
        """Its exit code and what it said."""
        _, text = self.process.communicate(timeout=within_s)
        return self.process.returncode, text

    def close(self) -> None:
        self._client.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


Start = Callable[[str], Gateway]


@pytest.fixture
def start(model_directory: Path, tmp_path: Path) -> Iterator[Start]:
    started: list[Gateway] = []

    def start(behaviour: str) -> Gateway:
        started.append(Gateway(model_directory, tmp_path, behaviour))
        return started[-1]

    yield start
    for gateway in started:
        gateway.close()


# ---- the port --------------------------------------------------------------------------------------------------


def test_a_port_in_use_is_an_error_before_anything_is_loaded() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        options = GatewayOptions(port=port, control="ipc://unused", tokenizer=Path("/nowhere"), model=MODEL)
        with pytest.raises(InputError, match=f"^port: 127.0.0.1:{port} is in use"):
            run_gateway(options)


def test_a_host_that_is_not_ours_is_refused_by_name() -> None:
    with pytest.raises(
        InputError, match=r"^host: must be an address of this machine, is '192\.0\.2\.1'"
    ):  # TEST-NET-1, nobody's
        bind("192.0.2.1", 0)
    with pytest.raises(InputError, match=r"^host: must be an address of this machine, is 'a\.\.b'"):
        bind("a..b", 0)


def test_the_address_is_told_as_a_client_writes_it() -> None:
    with bind("127.0.0.1", 0) as listener:
        assert url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"
    if socket.has_dualstack_ipv6():
        with bind("::1", 0) as listener:
            assert url_of(listener) == f"http://[::1]:{listener.getsockname()[1]}"


# ---- connections -----------------------------------------------------------------------------------------------


def test_who_sends_no_request_in_time_is_hung_up_on_and_nobody_else(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.gateway.server.HEAD_PATIENCE_S", 0.1)
    told = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
    body = b'{"model": "mill", "prompt": "x"}'
    asking = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)

    async def scenario(front: Front, address: tuple[str, int]) -> None:
        (silent, nothing), (slow, first), (kept, second), (waits, third) = [
            await asyncio.open_connection(*address) for _ in range(4)
        ]
        first.write(told[:9])
        second.write(told)
        assert b" 200 " in await kept.readline()
        second.write(told[:9])  # on a connection that has had its answer
        third.write(asking)
        async with asyncio.timeout(5):
            assert await silent.read() == await slow.read() == b""
            await kept.read()
            await asyncio.sleep(0.15)
            third.write(body)  # its head came in time, its body may take longer
            assert b" 200 " in await waits.readline()
        for writer in (nothing, first, second, third):
            writer.close()

    play(model_directory, scenario)


def test_a_request_whose_head_never_ends_is_refused_and_a_long_body_is_none(model_directory: Path) -> None:
    body = json.dumps({"model": MODEL, "prompt": "x", "user": "y" * MOST_HEAD_BYTES}).encode()
    asking = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)

    async def scenario(front: Front, address: tuple[str, int]) -> None:
        (endless, first), (whole, second), (kept, third) = [await asyncio.open_connection(*address) for _ in range(3)]
        first.write(b"GET /v1/models HTTP/1.1\r\n")
        for _ in range(1 + MOST_HEAD_BYTES // 8000):
            first.write(b"x: " + b"y" * 7995 + b"\r\n")
        second.write(asking + body)
        async with asyncio.timeout(5):
            refusal = await endless.read()
            assert b" 400 " in refusal and b"must be at most 65536 bytes" in refusal
            assert b" 200 " in await whole.readline()
            for _ in range(3):  # one after the other they may be longer
                third.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx: " + b"y" * (MOST_HEAD_BYTES // 2))
                await asyncio.sleep(0.02)
                third.write(b"\r\n\r\n")
                assert b" 200 " in await kept.readuntil(b"}]}")
        for writer in (first, second, third):
            writer.close()

    play(model_directory, scenario)


ENDLESS = b'{"model": "mill", "prompt": "x", "stream": true}'
STREAM = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(ENDLESS), ENDLESS)
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n"
TOO_LARGE = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999\r\n\r\n"


@pytest.mark.parametrize("begun", [STREAM + b"GET / HTTP/1.1\r\n", CHUNKED], ids=["behind a stream", "trailers"])
def test_headers_that_never_end_are_refused_wherever_they_come(model_directory: Path, begun: bytes) -> None:
    async def scenario(front: Front, address: tuple[str, int]) -> None:
        front.dispatch.script = without_end
        reader, writer = await asyncio.open_connection(*address)
        writer.write(begun)
        await asyncio.sleep(0.05)  # so that nothing of it is read with what follows
        for _ in range(1 + MOST_HEAD_BYTES // 8000):
            writer.write(b"x: " + b"y" * 7995 + b"\r\n")
        async with asyncio.timeout(5):
            assert b"must be at most 65536 bytes" in await reader.read()
        writer.close()

    play(model_directory, scenario)


def test_a_body_that_is_not_wanted_any_more_is_no_head(model_directory: Path) -> None:
    async def scenario(front: Front, address: tuple[str, int]) -> None:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(TOO_LARGE)
        async with asyncio.timeout(5):
            assert b" 413 " in await reader.readuntil(b"}}")
            writer.write(b"y" * 2 * MOST_HEAD_BYTES)  # as a client does that reads when it has sent
            await writer.drain()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await reader.read(1)
        writer.close()

    play(model_directory, scenario)


@pytest.mark.parametrize("num_behind", [1, 3])
def test_a_client_that_leaves_with_requests_behind_the_one_that_runs_ends_that(
    model_directory: Path, num_behind: int
) -> None:
    async def scenario(front: Front, address: tuple[str, int]) -> None:
        front.dispatch.script = without_end
        reader, writer = await asyncio.open_connection(*address)
        writer.write(STREAM + num_behind * b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(5):
            await reader.readuntil(b"data: ")
            writer.transport.abort()
            while not front.dispatch.aborted:
                await asyncio.sleep(0.01)

    play(model_directory, scenario)


def without_end(_: Generation) -> Iterator[Step]:
    yield Progress(token_ids=(65,))
    yield asyncio.Event()


def play(model_directory: Path, scenario: Callable[[Front, tuple[str, int]], Coroutine[Any, Any, None]]) -> None:
    """At the address of a server on a loop of its own."""
    with a_front(make_intake(model_directory)) as front, bind("127.0.0.1", 0) as listener:
        front.says("and the mill turned.")
        server = make_server(front.app)

        async def serve() -> None:
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            await scenario(front, listener.getsockname()[:2])
            server.should_exit = True
            await serving

        front.runner.run(serve())


def test_a_gateway_may_have_as_many_connections_as_the_system_lets_it() -> None:
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(before, 512), most))
        take_all_descriptors()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))


# ---- the end ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_streams_with_an_error_and_the_process_with_0(start: Start, number: signal.Signals) -> None:
    gateway = start("endless")
    lines = gateway.lines()
    assert json.loads(next(lines))["choices"]
    signalled = time.monotonic()
    gateway.process.send_signal(number)
    *_, error, done = lines
    assert "shutting down" in json.loads(error)["error"]["message"]
    assert done == "[DONE]"
    assert time.monotonic() - signalled < 2  # 0.7 s where nothing else runs
    returncode, text = gateway.ended(within_s=5)
    assert returncode == 0, text
    assert "Traceback" not in text


def test_a_client_that_reads_nothing_does_not_hold_up_the_end(start: Start) -> None:
    gateway = start("floods")
    host, port = gateway.url.removeprefix("http://").split(":")
    body = json.dumps({"model": MODEL, "prompt": "x", "stream": True})
    with socket.create_connection((host, int(port))) as client:
        client.sendall(
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
        )
        assert client.recv(1)
        gateway.process.terminate()
        returncode, text = gateway.ended(within_s=10)
    assert returncode == 0, text


def test_when_the_dispatch_side_fails_the_process_ends_with_an_error(start: Start) -> None:
    gateway = start("fails")
    *_, error, done = gateway.lines()
    assert (json.loads(error)["error"]["type"], done) == ("server_error", "[DONE]")
    returncode, text = gateway.ended(within_s=10)
    assert returncode != 0
    assert "RuntimeError: the dispatch side has failed" in text


def test_without_instances_it_serves_nothing_and_says_so(start: Start) -> None:
    gateway = start("real")
    assert gateway.get("/health").status_code == 503
    assert gateway.get("/v1/models").status_code == 200
    assert "headrace_" in gateway.get("/metrics").text
    response = gateway.post()
    assert response.status_code == 503 and response.headers["retry-after"]
    gateway.process.terminate()
    returncode, text = gateway.ended(within_s=5)
    assert returncode == 0, text
    assert text.count("answers at http://127.0.0.1:") == 1
