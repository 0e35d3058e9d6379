"""A gateway and its instances as processes of their own, each on the cores that it is given."""

import asyncio
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from _client import NO_HEADERS, Endpoint, Stream

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
    """`with Deployment(...) as running:` ; everything has ended on leaving. `log_level` debug shows the waterfalls.
    `model` is a directory; without it the built-in one serves. Instances are named by role and place: prefiller-0."""

    def __init__(
        self,
        instances: Sequence[InstanceSpec],
        *,
        model: Path | None = None,
        common: Sequence[str] = (),
        gateway: Sequence[str] = (),
        log_level: str = "info",
        gateway_cores: str = "",
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="headrace-bench-"))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._log = (self._folder / "log").open("wb")
        control = f"ipc://{self._folder}/control.sock"
        self._port = free_port()
        named = [*NAMED, *(() if model is None else ("--model", str(model)))]
        words = ["gateway", "--control", control, "--port", str(self._port), "--name", "gateway", *named, *gateway]
        self._commands = {"gateway": _command([*words, "--log-level", log_level], cores=gateway_cores)}
        for number, spec in enumerate(instances):
            command = "decoder" if spec.role == "colocated" else spec.role
            name = f"{spec.role}-{number}"
            words = [command, "--gateway", control, "--name", name, *named, *common, *spec.options]
            if spec.role == "colocated":
                words.append("--colocated")
            self._commands[name] = _command(words, cores=spec.cores, netns=spec.netns)
        for name in self._commands:
            self.start(name)

    def start(self, name: str) -> None:
        """One that is not running; `wait_ready` waits for it."""
        assert name not in self._processes, f"{name} runs"
        self._processes[name] = subprocess.Popen(
            self._commands[name], stdout=self._log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )

    def signal(self, name: str, number: signal.Signals) -> None:
        self._processes[name].send_signal(number)

    def kill(self, name: str) -> None:
        """At once, with nothing said."""
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    @property
    def pids(self) -> dict[str, int]:
        """By name, of those that run."""
        return {name: process.pid for name, process in self._processes.items()}

    def __enter__(self) -> Self:
        try:
            asyncio.run(self.wait_ready())
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    async def wait_ready(self) -> None:
        """Until the gateway sees every instance that runs."""
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            for name, process in self._processes.items():
                if process.poll() is not None:
                    raise SystemExit(f"{name} ended with {process.returncode}:\n{self.log()}")
            if await self._num_announced() == len(self._processes) - 1:
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

    async def gauges(self) -> dict[tuple[str, str], float]:
        """Instances' gauges and counters, as they were told half a second ago at most, by (instance, name)."""
        _, text = await self.get("/metrics")
        pattern = r'headrace_instance_(\w+)\{instance="([^"]+)",role="\w+"\} (\S+)'
        return {(instance, name): float(value) for name, instance, value in re.findall(pattern, text)}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in reversed(self._processes.values()):
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGCONT)  # one that is stopped could not end
        for process in self._processes.values():
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
        self,
        token_ids: Sequence[int],
        max_tokens: int,
        *,
        into: Stream | None = None,
        headers: Mapping[str, str] = NO_HEADERS,
        **fields: object,
    ) -> Stream:
        """See `Endpoint.complete`."""
        return await self.endpoint.complete(token_ids, max_tokens, into=into, headers=headers, **fields)

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self._port, MODEL)


def _command(words: Sequence[str], *, cores: str, netns: str = "") -> list[str]:
    command = [sys.executable, "-m", "headrace", *words]
    if cores:
        command = ["taskset", "-c", cores, *command]
    if netns:
        command = ["ip", "netns", "exec", netns, *command]
    return command


def free_port() -> int:
    """Of 127.0.0.1."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
