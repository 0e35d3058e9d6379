"""A profile as it runs: a colocated role in this process, with stopwatches on; gateway and client as processes.

Owns both processes until they have ended. Runs on the role's loop; the model has its own thread, as always. The client
asks for all streams at once, and the steps that count are those in which all of them decode.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from headrace.cli.child import Running, guard_of
from headrace.cli.failure import ERROR_FILE
from headrace.cli.machine import cpu_ns, describe_machine, steal_share, ticks
from headrace.cli.profile_step.client import Came, read_came, write_asked
from headrace.cli.profile_step.plan import HOST, WARM_STEPS, ProfilePlan
from headrace.cli.profile_step.report import Part, Profile, Spread, StreamsProfile
from headrace.cli.profile_step.steps import PARTS, StepTimes, StepWatch
from headrace.cli.profile_step.stopwatch import cost_ns
from headrace.cli.readiness import wait_until_ready
from headrace.cli.supervisor import ChildEnded
from headrace.errors import HeadraceError
from headrace.model.ops import Ops
from headrace.model.read_rate import read_rate
from headrace.model.timed_ops import OpTimes, TimedOps
from headrace.roles.decoder import Decoder
from headrace.roles.exit_status import described
from headrace.roles.instance import Instance, open_instance
from headrace.roles.stopping import stoppable

LONGEST_S = 600.0
"""That one number of streams may take."""


class StreamsFailed(HeadraceError):
    """The client's streams failed, or ended before there were enough steps."""


def run_profile(plan: ProfilePlan) -> Profile | None:
    """None where a signal ended it. Raises InputError, ChildEnded, StreamsFailed."""
    model = _WatchedModel(plan)
    profiles: list[StreamsProfile] = []  # also where a signal comes while the model is loaded
    before = ticks()
    with stoppable() as process, model.opened() as instance:
        profiled = _Profiled(plan, instance, model.times)
        process.run(profiled.run)
        profiles = profiled.profiles
    if not profiles:
        return None
    return Profile(
        machine=f"{describe_machine()}, steal {steal_share(before):.1%}",
        kernels=model.kernels,
        workload=_workload(plan),
        weight_bytes=model.weight_bytes,
        read_gbps=model.read_gbps(plan.options.threads),
        chooses_weights=plan.shape.experts is not None,
        streams=profiles,
    )


def _workload(plan: ProfilePlan) -> str:
    options = plan.options
    drawn = f"temperature {options.temperature:g}" if options.temperature else "greedy"
    return f"{options.model} in {options.dtype}, {options.num_steps} steps from {options.kv_len} keys on, {drawn}"


class _WatchedModel:
    """The model of the instance, opened with its operations timed."""

    def __init__(self, plan: ProfilePlan) -> None:
        self.times = OpTimes()
        self.kernels = ""
        self._plan = plan
        self._ops: TimedOps | None = None

    @contextmanager
    def opened(self) -> Iterator[Instance]:
        with open_instance(self._plan.instance, wrap=self._wrap) as instance:
            yield instance

    def _wrap(self, ops: Ops, told: str) -> Ops:
        self.kernels = told
        self._ops = TimedOps(ops, self.times, vocab_size=self._plan.shape.vocab_size)
        return self._ops

    @property
    def weight_bytes(self) -> int:
        return 0 if self._ops is None else self._ops.weight_bytes

    def read_gbps(self, num_threads: int) -> float | None:
        is_native = self.kernels.startswith("native")
        return read_rate(self.weight_bytes, num_threads=num_threads) / 1e9 if is_native else None


class _Profiled:
    def __init__(self, plan: ProfilePlan, instance: Instance, times: OpTimes) -> None:
        self._plan = plan
        self._instance = instance
        self._times = times
        self.profiles: list[StreamsProfile] = []  # one for each number of streams, once all are there

    async def run(self) -> None:
        watch = StepWatch(self._times)
        async with guard_of(self._plan.directory) as guard, self._gateway(guard.pid) as gateway:
            with watch.watching():
                async with asyncio.TaskGroup() as tasks:
                    beside = [tasks.create_task(Decoder(self._instance).run())]
                    beside.append(tasks.create_task(self._watch(gateway)))
                    await wait_until_ready(HOST, self._plan.port, {"colocated": 1})
                    self.profiles = [
                        await self._profile(num_streams, watch, gateway, group=guard.pid)
                        for num_streams in self._plan.options.streams
                    ]
                    for task in beside:
                        task.cancel()

    @asynccontextmanager
    async def _gateway(self, group: int) -> AsyncIterator[Running]:
        environment = {**os.environ, ERROR_FILE: str(self._words_file)}
        async with _child(self._plan.gateway_command(), group=group, environment=environment) as gateway:
            yield gateway

    async def _watch(self, gateway: Running) -> None:
        status = await gateway.wait()
        words = self._words_file.read_text() if self._words_file.exists() else described(status)
        raise ChildEnded(f"gateway: {words}", status=2 if status == 2 else 1)

    @property
    def _words_file(self) -> Path:
        return self._plan.directory / "gateway.error"

    async def _profile(self, num_streams: int, watch: StepWatch, gateway: Running, *, group: int) -> StreamsProfile:
        asked_file = self._plan.directory / f"streams-{num_streams}.json"
        write_asked(asked_file, self._plan.asked(num_streams))
        async with (
            asyncio.timeout(LONGEST_S),
            _child(self._plan.client_command(asked_file), group=group, environment=dict(os.environ)) as client,
        ):
            await _unless_ended(client, watch.steps(num_streams, WARM_STEPS), asked_file)
            cpu_before = cpu_ns(gateway.pid)
            steps = await _unless_ended(client, watch.steps(num_streams, self._plan.options.num_steps), asked_file)
            gateway_ns = cpu_ns(gateway.pid) - cpu_before
            came = _came(await client.wait(), asked_file)
        return profile_of(steps, came, gateway_ns=gateway_ns, key_bytes=self._plan.key_bytes)


def profile_of(
    steps: Sequence[StepTimes], came: Came, *, gateway_ns: int, key_bytes: Callable[[int], int]
) -> StreamsProfile:
    """`key_bytes(kv_len)` are those that a row reads."""
    num_streams, total_ns = len(steps[0].kv_lens), sum(step.whole_ns for step in steps)
    begin, end = steps[0].began_ns, steps[-1].ended_ns
    gaps = [
        late - early for times in came.times_ns for early, late in pairwise(times) if begin <= early and late <= end
    ]
    stopwatch_ns = cost_ns() * max(step.num_op_calls + step.num_watched_calls for step in steps)
    return StreamsProfile(
        num_streams=num_streams,
        num_steps=len(steps),
        parts={
            name: Part(
                ms=_in_ms([step.parts_ns[name] for step in steps]),
                share=sum(step.parts_ns[name] for step in steps) / total_ns,
            )
            for name in PARTS
        },
        step_ms=_in_ms([step.whole_ns for step in steps]),
        itl_ms=_in_ms(gaps),
        gateway_cpu_ms=gateway_ns / 1e6 / (num_streams * len(steps)),
        stopwatch_ms=stopwatch_ns / 1e6,
        key_bytes=fmean(sum(map(key_bytes, step.kv_lens)) for step in steps),
    )


def _in_ms(values_ns: Sequence[int]) -> Spread:
    return Spread.of([value / 1e6 for value in values_ns])


@asynccontextmanager
async def _child(command: Sequence[str], *, group: int, environment: dict[str, str]) -> AsyncIterator[Running]:
    process = Running(command, group=group, environment=environment)
    try:
        yield process
    finally:
        process.send(signal.SIGKILL)
        await process.wait()


async def _unless_ended(client: Running, steps: Awaitable[list[StepTimes]], asked_file: Path) -> list[StepTimes]:
    """The steps. Raises StreamsFailed when the client ends before they are there."""
    wanted, ended = asyncio.ensure_future(steps), asyncio.ensure_future(client.wait())
    try:
        await asyncio.wait((wanted, ended), return_when=asyncio.FIRST_COMPLETED)
        if not wanted.done():
            _came(ended.result(), asked_file)
            raise StreamsFailed("the streams ended before there were enough steps in which all of them decode")
        return wanted.result()
    finally:
        wanted.cancel()
        ended.cancel()


def _came(status: int, asked_file: Path) -> Came:
    if status:
        raise StreamsFailed(f"the client {described(status)}")
    came = read_came(asked_file)
    if came.error:
        raise StreamsFailed(f"a stream failed: {came.error}")
    return came
