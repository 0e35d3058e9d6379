"""A gateway and its instances as processes of their own, each on the cores that it is given."""

import asyncio
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from _client import Endpoint, Stream

MODEL = "bench"
NAMED = ("--served-name", MODEL)
START_S = 120.0


@dataclass(frozen=True)
class InstanceSpec:
    """One instance: `role` as the command, where it runs, and its further options."""

    role: str  # prefiller, decoder, colocated
    cores: str = ""  # of taskset; empty: wherever
    options: Sequence[str] = ()
    netns: str = ""  # network namespace; empty: this one


def split(transport: str, *options: str, cores: tuple[str, str] = ("1", "0")) -> tuple[InstanceSpec, InstanceSpec]:
    """A prefiller with these options and a decoder, each on cores of its own."""
    prefiller, decoder = cores
    over = ("--require-provider", transport)
    return (
        InstanceSpec("prefiller", cores=prefiller, options=(*over, *options)),
        InstanceSpec("decoder", cores=decoder, options=over),
    )


class Deployment:
    """`with Deployment(...) as running:` ; everything has ended on leaving. `log_level` debug shows the waterfalls."""

    def __init__(
        self,
        instances: Sequence[InstanceSpec],
        *,
        common: Sequence[str] = (),
        log_level: str = "info",
        gateway_cores: str = "",
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="headrace-bench-"))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._log = (self._folder / "log").open("wb")
        control = f"ipc://{self._folder}/control.sock"
        self._port = free_port()
        gateway = ["gateway", "--control", control, "--port", str(self._port), "--name", "gateway", *NAMED]
        self._start([*gateway, "--log-level", log_level], cores=gateway_cores)
        for number, spec in enumerate(instances):
            command = "decoder" if spec.role == "colocated" else spec.role
            words = [command, "--gateway", control, "--name", f"{spec.role}-{number}", *NAMED, *common, *spec.options]
            if spec.role == "colocated":
                words.append("--colocated")
            self._start(words, cores=spec.cores, netns=spec.netns)
        self._num_instances = len(instances)

    def _start(self, words: Sequence[str], *, cores: str, netns: str = "") -> None:
        command = [sys.executable, "-m", "headrace", *words]
        if cores:
            command = ["taskset", "-c", cores, *command]
        if netns:
            command = ["ip", "netns", "exec", netns, *command]
        process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        self._processes.append(process)

    def __enter__(self) -> Self:
        try:
            asyncio.run(self._wait_ready())
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    async def _wait_ready(self) -> None:
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            for process in self._processes:
                if process.poll() is not None:
                    raise SystemExit(f"a process ended with {process.returncode}:\n{self.log()}")
            if await self._num_announced() == self._num_instances:
                return
            await asyncio.sleep(0.1)
        raise SystemExit(f"not ready after {START_S:.0f} s:\n{self.log()}")

    async def _num_announced(self) -> int:
        try:
            status, text = await self.get("/metrics")
        except OSError:
            return 0
        lines = [line for line in text.splitlines() if line.startswith("headrace_instances_alive{")]
        return sum(int(float(line.split()[-1])) for line in lines) if status == 200 else 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._log.close()
        shutil.rmtree(self._folder)

    def log(self) -> str:
        self._log.flush()
        return (self._folder / "log").read_text(errors="replace")

    async def get(self, path: str) -> tuple[int, str]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(f"GET {path} HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n".encode())
            answer = (await reader.read()).decode(errors="replace")
        finally:
            writer.close()
        return int(answer.split()[1]), answer

    async def complete(
        self, token_ids: Sequence[int], max_tokens: int, *, into: Stream | None = None, **fields: object
    ) -> Stream:
        """See `Endpoint.complete`."""
        return await self.endpoint.complete(token_ids, max_tokens, into=into, **fields)

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self._port, MODEL)


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between the two nearest."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * share
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def steal_share() -> tuple[int, int]:
    """(stolen, all) jiffies since boot, all cores."""
    fields = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return fields[7], sum(fields)


def free_port() -> int:
    """Of 127.0.0.1."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
