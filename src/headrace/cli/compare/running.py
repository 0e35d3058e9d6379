"""An arm while it runs: a gateway and its instances as processes of their own, each held to its core.

Owns them from the first start until all have ended. Their output is in one log, from which each request's waterfall is
read. One that ends by itself ends the arm with the log's last lines.
"""

import asyncio
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from headrace.bench.records import Waterfall
from headrace.cli.child import Running, guard_of
from headrace.cli.compare.arms import ArmPlan, Served, gateway_command, instance_command
from headrace.cli.compare.gateway_log import read_waterfalls
from headrace.cli.compare.link import Ends
from headrace.cli.network import require_free_port
from headrace.cli.readiness import get, wait_until_ready
from headrace.cli.run_directory import private_directory
from headrace.errors import HeadraceError
from headrace.model.footprint import footprint_of

HOST = "127.0.0.1"
READY_S, END_S = 180.0, 10.0
LAST_LINES = 12


class ArmFailed(HeadraceError):
    """Its processes did not start, or ended by themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningArm:
    """`pids`: by name of the process."""

    url: str
    port: int
    log: Path
    pids: Mapping[str, int]

    def waterfalls(self) -> dict[str, Waterfall]:
        """By the id that the client has of a request."""
        return read_waterfalls(self.log.read_text(errors="replace"))

    async def counters(self) -> dict[str, float]:
        """Of instances, summed by name, as they were told half a second ago at most."""
        status, text = await get(HOST, self.port, "/metrics")
        found: dict[str, float] = {}
        for name, value in re.findall(r"^headrace_instance_(\w+_total)\{[^}]*\} (\S+)$", text, re.MULTILINE):
            found[name] = found.get(name, 0.0) + float(value)
        return found if status == 200 else {}

    def memory(self) -> dict[str, float]:
        """Bytes of all its processes: their own (unique), and what they share, each page once for every holder."""
        told = []
        for pid in self.pids.values():
            with suppress(OSError):  # it has just ended
                told.append(footprint_of(pid))
        return {
            "memory_unique_bytes": sum(one.own_bytes for one in told),
            "memory_shared_bytes": max((one.shared_bytes for one in told), default=0),
            "memory_proportional_bytes": sum(one.proportional_bytes for one in told),
        }


@asynccontextmanager
async def started(plan: ArmPlan, served: Served, ends: Ends | None = None) -> AsyncIterator[RunningArm]:
    """Ready when this is entered, ended when it is left. Raises ArmFailed, also out of what runs inside."""
    with private_directory() as directory:
        log = directory / "log"
        port = require_free_port(HOST, 0)
        async with guard_of(directory) as guard:
            with log.open("wb") as output:
                processes = _start(
                    plan, served, ends, directory=directory, port=port, group=guard.pid, output=output.fileno()
                )
            running = RunningArm(
                url=f"http://{HOST}:{port}",
                port=port,
                log=log,
                pids={name: process.pid for name, process in processes.items()},
            )
            try:
                async with _watched(processes, log):
                    await _ready(plan, port)
                    yield running
            finally:
                await _end(list(processes.values()))


def _start(
    plan: ArmPlan, served: Served, ends: Ends | None, *, directory: Path, port: int, group: int, output: int
) -> dict[str, Running]:
    commands = {"gateway": gateway_command(plan, served, directory=directory, port=port)}
    for instance in plan.instances:
        if ends is None or instance.role == "colocated":
            commands[instance.name] = instance_command(instance, served, directory=directory)
        else:
            address = ends.addresses[instance.side]
            command = instance_command(instance, served, directory=directory, address=address)
            commands[instance.name] = ends.inside(instance.side, command)
    return {name: Running(command, group=group, output=output) for name, command in commands.items()}


@asynccontextmanager
async def _watched(processes: Mapping[str, Running], log: Path) -> AsyncIterator[None]:
    """Whatever runs inside is cancelled when one of them ends."""

    async def watch(name: str, process: Running) -> None:
        status = await process.wait()
        lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
        raise ArmFailed("\n  ".join([f"{name} ended with status {status}:", *lines]))

    try:
        async with asyncio.TaskGroup() as tasks:
            watches = [tasks.create_task(watch(name, process)) for name, process in processes.items()]
            yield
            for task in watches:
                task.cancel()
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _ready(plan: ArmPlan, port: int) -> None:
    wanted: dict[str, int] = dict(Counter(one.role for one in plan.instances))
    try:
        async with asyncio.timeout(READY_S):
            await wait_until_ready(HOST, port, wanted)
    except TimeoutError:
        raise ArmFailed(f"{plan.arm.name} was not ready within {READY_S:.0f} s") from None


async def _end(processes: list[Running]) -> None:
    for process in processes:
        process.send(signal.SIGTERM)
    _, late = await asyncio.wait([asyncio.ensure_future(process.wait()) for process in processes], timeout=END_S)
    for process in processes if late else []:
        process.send(signal.SIGKILL)
    for task in late:
        await task
