"""The pump on a real loop: woken by the fabric, by timers, by an exit; ended by errors and by cancellation."""

import asyncio
import contextlib
import os
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from kv_world import NATIVE_TRANSPORTS, DecoderProcess, LoopbackSite, NativeSite, PrefillerProcess, pool_layout
from pattern_model import prefix_keys

from headrace.fabric.interface import LAYERS_PER_STEP, Event, MessageReceived, PeerId
from headrace.fabric.native import Transport
from headrace.messenger.jobs import Chunk
from headrace.messenger.outcomes import (
    DecoderOutcome,
    PeerReady,
    PrefillerOutcome,
    PrefillJob,
    Ready,
)
from headrace.messenger.process import ProcessName, _start_ticks
from headrace.messenger.pump import Pump
from headrace.testing import LoopbackFabric

PATIENCE_S = 10.0


@dataclass(slots=True)
class Scripted:
    """A messenger that tells what it is given, and writes down what it is asked."""

    outcomes: list[PeerReady] = field(default_factory=list)
    due: float | None = None
    events: list[Event] = field(default_factory=list)
    advanced: list[float] = field(default_factory=list)
    exited: list[PeerId] = field(default_factory=list)
    fails_at_exit: bool = False
    at_next_handle: list[PeerReady] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)

    def handle(self, events: Sequence[Event], now: float) -> None:
        self.calls.append("handle")
        self.events += events
        self.outcomes += self.at_next_handle
        self.at_next_handle.clear()

    def advance(self, now: float) -> None:
        self.calls.append("advance")
        self.advanced.append(now)
        if self.due is not None and self.due <= now:
            self.due = None

    def next_due(self) -> float | None:
        return self.due

    def peer_exited(self, peer: PeerId, now: float) -> None:
        self.calls.append("peer_exited")
        if self.fails_at_exit:
            raise ArithmeticError("an error of the messenger")
        self.exited.append(peer)

    def drain_outcomes(self) -> Sequence[PeerReady]:
        outcomes, self.outcomes = self.outcomes, []
        return outcomes


def ignore(outcome: object) -> None:
    pass


@contextlib.asynccontextmanager
async def running(pump: Pump[PeerReady]) -> AsyncIterator[asyncio.Task[None]]:
    """Cancelled at the end, and nothing but the cancellation may come out of it."""
    task = asyncio.create_task(pump.run())
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.001)


@pytest.fixture
def site() -> LoopbackSite:
    return LoopbackSite(seed=1)


@pytest.fixture
def fabric(site: LoopbackSite) -> Iterator[LoopbackFabric]:
    made, _ = site.endpoint(pool_layout(2))
    yield made
    made.close()


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[bytes]]]:
    with subprocess.Popen(["sleep", "60"]) as first, subprocess.Popen(["sleep", "60"]) as second:
        yield [first, second]
        first.kill()
        second.kill()


@pytest.fixture
def child(children: list[subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    return children[0]


def pidfds() -> set[int]:
    """Not all that is open: whatever the collector finds meanwhile may close some of it."""
    links = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            links[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return {fd for fd, link in links.items() if link in ("anon_inode:[pidfd]", "pidfd:")}


def num_pidfds() -> int:
    return len(pidfds())


def ready(process: ProcessName, peer: int = 1) -> PeerReady:
    return PeerReady(peer=PeerId(peer), uuid="0" * 32, process=process)


def name_of(process: subprocess.Popen[bytes]) -> ProcessName:
    return replace(ProcessName.own(), pid=process.pid, started=_start_ticks(process.pid))


# ---- a ticket, end to end --------------------------------------------------------------------------------------


class Prefilling:
    """The engine of a prefiller as one coroutine: prompts one after the other, a chunk a step."""

    def __init__(self, process: PrefillerProcess) -> None:
        self.process = process
        self.jobs: asyncio.Queue[PrefillJob] = asyncio.Queue()
        self.pump: Pump[PrefillerOutcome] = Pump(process.messenger, process.fabric, self.on_outcome)

    def on_outcome(self, outcome: PrefillerOutcome) -> None:
        if isinstance(outcome, PrefillJob):
            self.jobs.put_nowait(outcome)

    async def run(self) -> None:
        process, step = self.process, 0
        while True:
            job = await self.jobs.get()
            keys, end = prefix_keys(job.token_ids), len(job.token_ids) - 1
            for begin in range(job.cached_len, end, 8):
                step += 1
                chunk = Chunk(ticket=job.ticket, begin=begin, end=min(begin + 8, end))
                process.messenger.begin_step(step, [chunk])
                for layer in range(process.model.layout.kv.num_layers):
                    now = keys[chunk.begin : chunk.end]
                    process.model.compute_layer(process.memory, layer, now, job.pages, begin)
                    process.fabric.raise_layers(step * LAYERS_PER_STEP + layer + 1)
                    await asyncio.sleep(0)
                process.messenger.commit_step(step, time.monotonic())
                self.pump.poke()


class Decoding:
    def __init__(self, process: DecoderProcess) -> None:
        self.process = process
        self.told: list[DecoderOutcome] = []
        self.pump: Pump[DecoderOutcome] = Pump(process.messenger, process.fabric, self.told.append)

    def told_of(self, kind: type[DecoderOutcome]) -> list[DecoderOutcome]:
        return [outcome for outcome in self.told if isinstance(outcome, kind)]

    async def fetch(self, prefiller: PrefillerProcess, name: str, prompt: tuple[int, ...]) -> None:
        process, num_ready = self.process, len(self.told_of(Ready))
        peer = process.messenger.greet(prefiller.fabric.address, time.monotonic())
        self.pump.poke()
        await until(lambda: process.messenger.is_ready(peer))
        request, lease = process.reserve(name, prompt), prefiller.lease(name, len(prompt))
        assert request is not None
        assert lease is not None
        assert process.open(request, peer, lease) is not None
        self.pump.poke()
        await until(lambda: len(self.told_of(Ready)) > num_ready)
        assert process.wrong_bytes(request) == []
        process.finish(request)


@pytest.mark.parametrize("transport", NATIVE_TRANSPORTS)
def test_tickets_are_served_end_to_end_by_two_pumps_on_one_loop(transport: Transport) -> None:
    site = NativeSite(transport)
    prefilling = Prefilling(PrefillerProcess(site, pool_layout(32)))
    decoding = Decoding(DecoderProcess(site, pool_layout(40)))

    async def serve() -> None:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run()) for run in (prefilling.pump.run, decoding.pump.run, prefilling.run)]
            for i, length in enumerate([2, 14, 50]):
                await decoding.fetch(prefilling.process, f"r{i}", tuple(range(100 * i, 100 * i + length)))
            await until(lambda: prefilling.process.messenger.statistics().num_tickets == 0)
            for task in tasks:
                task.cancel()

    try:
        asyncio.run(serve())
        assert [type(outcome) for outcome in decoding.told] == [PeerReady, Ready, Ready, Ready]
        decoding.process.messenger.check()
        prefilling.process.messenger.check()
    finally:
        site.close()


# ---- woken -----------------------------------------------------------------------------------------------------


def test_what_the_fabric_tells_wakes_the_pump(site: LoopbackSite, fabric: LoopbackFabric) -> None:
    messenger = Scripted()
    other = LoopbackFabric(site.network, np.zeros(64, dtype=np.uint8))

    async def main() -> None:
        async with running(Pump(messenger, fabric, ignore)):
            await until(lambda: bool(messenger.advanced))
            other.send(other.add_peer(fabric.address), b"good morning")
            while site.network.step():
                pass
            await until(lambda: bool(messenger.events))

    asyncio.run(main())
    assert messenger.events == [MessageReceived(message=b"good morning")]


def test_a_pump_with_nothing_to_do_does_nothing(fabric: LoopbackFabric) -> None:
    messenger = Scripted()

    async def main() -> None:
        async with running(Pump(messenger, fabric, ignore)):
            for _ in range(50):
                await asyncio.sleep(0.001)

    asyncio.run(main())
    assert len(messenger.advanced) == 1


def test_what_is_due_is_carried_out_when_it_is_due_and_not_before(fabric: LoopbackFabric) -> None:
    due = time.monotonic() + 0.05
    messenger = Scripted(due=due)

    async def main() -> None:
        async with running(Pump(messenger, fabric, ignore)):
            await until(lambda: messenger.due is None)

    asyncio.run(main())
    assert len(messenger.advanced) <= 4, "the pump spins while it waits"
    assert messenger.advanced[-1] >= due


def test_a_poke_makes_the_pump_look_at_its_timers_and_outcomes_again(fabric: LoopbackFabric) -> None:
    messenger, told = Scripted(), list[PeerReady]()
    elsewhere = ready(ProcessName(host="elsewhere", pid=os.getpid(), started=0))

    async def main() -> None:
        pump = Pump(messenger, fabric, told.append)
        async with running(pump):
            await until(lambda: bool(messenger.advanced))
            messenger.outcomes.append(elsewhere)
            messenger.due = time.monotonic() + 0.01
            pump.poke()
            await until(lambda: messenger.due is None)

    asyncio.run(main())
    assert told == [elsewhere]


def test_an_outcome_that_the_telling_of_another_causes_is_told_in_the_same_turn(fabric: LoopbackFabric) -> None:
    elsewhere = ProcessName(host="elsewhere", pid=1, started=0)
    messenger, told = Scripted(outcomes=[ready(elsewhere, 1)]), list[PeerId]()

    def tell(outcome: PeerReady) -> None:
        told.append(outcome.peer)
        if outcome.peer < 4:
            messenger.outcomes.append(ready(elsewhere, outcome.peer + 1))

    Pump(messenger, fabric, tell).turn()
    assert told == [1, 2, 3, 4]
    assert messenger.calls == ["handle", "advance"]


# ---- ended -----------------------------------------------------------------------------------------------------


def test_an_error_of_whoever_is_told_ends_the_pump_with_it(fabric: LoopbackFabric) -> None:
    messenger = Scripted(outcomes=[ready(ProcessName.own())])

    def fail(outcome: PeerReady) -> None:
        raise ArithmeticError(f"no use for {outcome.peer}")

    async def main() -> None:
        with pytest.raises(ArithmeticError, match="no use for 1"):
            await asyncio.wait_for(Pump(messenger, fabric, fail).run(), PATIENCE_S)
        assert not asyncio.get_running_loop().remove_reader(fabric.event_fd)

    num_before = num_pidfds()
    asyncio.run(main())
    assert num_pidfds() == num_before, "a pidfd leaks"


def test_an_error_of_the_messenger_at_an_exit_ends_the_pump_with_it(
    fabric: LoopbackFabric, child: subprocess.Popen[bytes]
) -> None:
    messenger = Scripted(outcomes=[ready(name_of(child))], fails_at_exit=True)

    async def main() -> None:
        run = asyncio.create_task(Pump(messenger, fabric, ignore).run())
        await until(lambda: bool(messenger.advanced))
        child.kill()
        with pytest.raises(ArithmeticError, match="an error of the messenger"):
            await asyncio.wait_for(run, PATIENCE_S)

    asyncio.run(main())


def test_a_cancelled_pump_leaves_neither_readers_nor_pidfds(
    fabric: LoopbackFabric, child: subprocess.Popen[bytes]
) -> None:
    messenger = Scripted(outcomes=[ready(name_of(child))])
    event_fd = fabric.event_fd

    async def main() -> None:
        loop, before = asyncio.get_running_loop(), pidfds()
        async with running(Pump(messenger, fabric, ignore)):
            await until(lambda: bool(messenger.advanced))
            watched = pidfds() - before
            assert len(watched) == 1
        assert not pidfds() - before
        assert not any(loop.remove_reader(fd) for fd in (event_fd, *watched))
        child.kill()
        child.wait()
        await asyncio.sleep(0.01)

    asyncio.run(main())
    assert messenger.exited == []


def test_a_pump_whose_fabric_was_closed_meanwhile_is_cancelled_all_the_same(
    fabric: LoopbackFabric, child: subprocess.Popen[bytes]
) -> None:
    messenger = Scripted(outcomes=[ready(name_of(child))])

    async def main() -> None:
        run = asyncio.create_task(Pump(messenger, fabric, ignore).run())
        await until(lambda: bool(messenger.advanced))
        num_before = num_pidfds()
        fabric.close()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert num_pidfds() == num_before - 1

    asyncio.run(main())


# ---- exits -----------------------------------------------------------------------------------------------------


def test_a_peer_that_is_killed_is_told_at_once_and_once(fabric: LoopbackFabric, child: subprocess.Popen[bytes]) -> None:
    messenger = Scripted(outcomes=[ready(name_of(child), 7), ready(name_of(child), 7)])

    async def main() -> None:
        async with running(Pump(messenger, fabric, ignore)):
            await until(lambda: bool(messenger.advanced))
            assert messenger.exited == []
            killed = time.monotonic()
            child.kill()
            await until(lambda: bool(messenger.exited))
            assert time.monotonic() - killed < 2.0, "no timer is that short: nobody watched"
            await asyncio.sleep(0.01)

    asyncio.run(main())
    assert messenger.exited == [7]


def test_a_peer_that_had_exited_before_it_was_watched_is_told_too(
    fabric: LoopbackFabric, child: subprocess.Popen[bytes]
) -> None:
    messenger = Scripted(outcomes=[ready(name_of(child), 7)])
    child.kill()
    child.wait()

    async def main() -> None:
        async with running(Pump(messenger, fabric, ignore)):
            await until(lambda: bool(messenger.exited))

    asyncio.run(main())
    assert messenger.exited == [7]


def test_a_peer_of_another_host_is_not_looked_for_among_our_processes(fabric: LoopbackFabric) -> None:
    messenger = Scripted(outcomes=[ready(ProcessName(host="elsewhere", pid=2**22 + 1, started=0))])

    async def main() -> None:
        pump = Pump(messenger, fabric, ignore)
        async with running(pump):
            await until(lambda: bool(messenger.advanced))
            pump.poke()
            await until(lambda: len(messenger.advanced) > 1)

    asyncio.run(main())
    assert messenger.exited == []


def test_what_the_fabric_told_before_an_exit_is_handled_before_it(
    fabric: LoopbackFabric, child: subprocess.Popen[bytes]
) -> None:
    messenger = Scripted(outcomes=[ready(name_of(child), 7)])

    async def main() -> None:
        async with running(Pump(messenger, fabric, ignore)):
            await until(lambda: bool(messenger.advanced))
            child.kill()
            await until(lambda: bool(messenger.exited))
            await asyncio.sleep(0.01)

    asyncio.run(main())
    assert messenger.calls == ["handle", "advance", "handle", "peer_exited", "advance"]


def test_of_two_processes_that_follow_each_other_as_one_peer_only_the_later_is_watched(
    fabric: LoopbackFabric, children: list[subprocess.Popen[bytes]]
) -> None:
    first, second = children
    messenger = Scripted(outcomes=[ready(name_of(first), 7)])

    async def main() -> None:
        pump = Pump(messenger, fabric, ignore)
        async with running(pump):
            await until(lambda: bool(messenger.advanced))
            num_before = num_pidfds()
            messenger.outcomes.append(ready(name_of(second), 7))
            pump.poke()
            await until(lambda: len(messenger.advanced) == 2)
            assert num_pidfds() == num_before
            first.kill()
            first.wait()
            await asyncio.sleep(0.02)
            assert messenger.exited == []
            second.kill()
            await until(lambda: bool(messenger.exited))
            assert num_pidfds() == num_before - 1

    asyncio.run(main())
    assert messenger.exited == [7]


def test_an_exit_that_is_noticed_when_its_successor_is_there_already_is_not_taken_for_the_successors(
    fabric: LoopbackFabric, children: list[subprocess.Popen[bytes]]
) -> None:
    first, second = children
    messenger = Scripted(outcomes=[ready(name_of(first), 7)])

    async def main() -> None:
        async with running(Pump(messenger, fabric, ignore)):
            await until(lambda: bool(messenger.advanced))
            messenger.at_next_handle = [ready(name_of(second), 7)]
            first.kill()  # and the loop comes to neither before the second has said Hello
            await until(lambda: len(messenger.advanced) == 2)
            await asyncio.sleep(0.02)
            assert messenger.exited == []
            second.kill()
            await until(lambda: bool(messenger.exited))

    asyncio.run(main())
    assert messenger.exited == [7]


def test_a_process_that_is_ready_under_a_newer_epoch_and_has_exited_is_told_once(
    fabric: LoopbackFabric, child: subprocess.Popen[bytes]
) -> None:
    name = name_of(child)
    messenger = Scripted(outcomes=[ready(name, 7)])

    async def main() -> None:
        async with running(Pump(messenger, fabric, ignore)):
            await until(lambda: bool(messenger.advanced))
            messenger.at_next_handle = [ready(name, 7)]
            child.kill()
            child.wait()
            await until(lambda: bool(messenger.exited))
            await asyncio.sleep(0.02)

    asyncio.run(main())
    assert messenger.exited == [7]


def test_a_peer_that_moved_to_another_host_is_not_watched_here_any_more(
    fabric: LoopbackFabric, child: subprocess.Popen[bytes]
) -> None:
    messenger = Scripted(outcomes=[ready(name_of(child), 7)])

    async def main() -> None:
        pump = Pump(messenger, fabric, ignore)
        async with running(pump):
            await until(lambda: bool(messenger.advanced))
            messenger.outcomes.append(ready(ProcessName(host="elsewhere", pid=child.pid, started=0), 7))
            pump.poke()
            await until(lambda: len(messenger.advanced) == 2)
            child.kill()
            child.wait()
            await asyncio.sleep(0.02)

    asyncio.run(main())
    assert messenger.exited == []
