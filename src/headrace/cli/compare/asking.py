"""Runs of one arm, which is started when the first is really to be made. Owns its processes until it is stopped.

Runs on the loop of the comparison, which decides what is asked when.
"""

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from headrace.bench.comparison import Arm, Rejected, Workload, arrivals_file, run_file
from headrace.bench.load.judging import judge_run
from headrace.bench.load.process import Order, run_load
from headrace.bench.metrics import Slo
from headrace.bench.records import RequestRecord, Run, RunEnd, RunHead, read_run, write_run
from headrace.bench.workload import ArrivalList
from headrace.cli.compare.arms import SERVED, ArmPlan, Served
from headrace.cli.compare.course import Point, num_requests, num_warm
from headrace.cli.compare.energy import Energy
from headrace.cli.compare.link import Ends
from headrace.cli.compare.lists import Lists
from headrace.cli.compare.progress import Progress
from headrace.cli.compare.running import ArmFailed, RunningArm, started
from headrace.cli.machine import steal_share, ticks
from headrace.errors import HeadraceError

FEWEST_REQUESTS = 10
REQUEST_TIMEOUT_S = 120.0
TRIES = 2
WARM = 1_000_000
"""A repetition that no run has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server that runs already: an arm without processes of ours."""

    arm: Arm
    url: str
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`slo` None: derived. `rates` None: searched (or, `is_quick`, two that follow from the idle run)."""

    directory: Path
    served: Served
    arms: Sequence[ArmPlan]
    targets: Sequence[Target]
    workloads: Sequence[Workload]
    lists: Lists
    seed: int
    seconds: float
    num_repetitions: int
    slo: Slo | None
    rates: tuple[float, ...] | None
    is_quick: bool
    ends: Ends | None
    vocabulary: tuple[int, int]

    @property
    def all_arms(self) -> list[Arm]:
        return [*(one.arm for one in self.arms), *(one.arm for one in self.targets)]

    @property
    def colocated(self) -> list[Arm]:
        """One for each chunk size."""
        return [arm for arm in self.all_arms if arm.kind == "colocated"]


class Unusable(HeadraceError):
    """A run failed itself each time that it was tried, and nothing can be derived without it."""


@dataclass(slots=True, kw_only=True)
class Told:
    """What is noticed beside the runs: by arm, facts; runs that failed themselves."""

    progress: Progress
    facts: dict[str, dict[str, float]] = field(default_factory=dict)
    rejected: list[Rejected] = field(default_factory=list)


class Ask:
    """Runs of one arm, which is started with the first that is not on file."""

    def __init__(self, plan: Plan, told: Told, name: str) -> None:
        self.name = name
        self._all, self._told = plan, told
        self._plan = next((one for one in plan.arms if one.arm.name == name), None)
        self._target = next((one for one in plan.targets if one.arm.name == name), None)
        self._tells_token_ids: bool | None = None  # not known before it was asked
        self._stack = AsyncExitStack()
        self._running: RunningArm | None = None

    async def stop(self) -> None:
        """Every process of it has ended."""
        await self._stack.aclose()

    @property
    def _arm(self) -> Arm:
        known = self._plan or self._target
        assert known is not None, "an arm that is not among those that are compared"
        return known.arm

    async def __call__(self, point: Point, given: ArrivalList | None = None, *, under: str = "runs") -> Run:
        """The run, from its file where it is there; of the workload's arrivals, or those that are given. Raises
        Unusable when it failed itself each time."""
        plan = self._all
        file = run_file(plan.directory, self._arm, point.workload, point.rate, point.repetition, under=under)
        if file.exists():
            self._told.progress.advance(plan.seconds)
            return read_run(file)
        arrivals = self._arrivals(point) if given is None else given
        kept = arrivals_file(plan.directory, point.workload, point.rate, point.repetition)
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(msgspec.json.encode(arrivals))
        reasons: list[str] = []
        for _ in range(TRIES):
            run = await self._made(point, arrivals)
            reasons = judge_run(arrivals, run.requests)
            if not reasons:
                write_run(file, run)
                self._told.progress.advance(plan.seconds)
                return run
        self._told.rejected.append(
            Rejected(
                arm=self._arm.name,
                workload=point.workload,
                rate=point.rate,
                repetition=point.repetition,
                reasons=tuple(reasons),
            )
        )
        raise Unusable(f"{self._arm.name}, {point.workload} at {point.rate:g}/s: {'; '.join(reasons)}")

    def _arrivals(self, point: Point) -> ArrivalList:
        num = num_requests(point.rate, self._all.seconds, fewest=FEWEST_REQUESTS)
        return self._all.lists.of(point.workload, point.rate, num, repetition=point.repetition)

    async def _made(self, point: Point, arrivals: ArrivalList) -> Run:
        await self._start()
        began, before, counted, energy = datetime.now(UTC), ticks(), await self._counters(), Energy()
        records = await self._offered(arrivals)
        stolen, joules = steal_share(before), energy.joules()
        await asyncio.sleep(0.6)  # a Status comes twice a second
        head = RunHead(
            arm=self._arm.name,
            workload=point.workload,
            digest=arrivals.digest,
            rate=point.rate,
            repetition=point.repetition,
            num_warm=num_warm(len(records)),
            began=began.isoformat(timespec="seconds"),
            devices=self._arm.devices,
        )
        return Run(
            head=head,
            requests=self._with_waterfalls(records),
            end=RunEnd(
                num_requests=len(records),
                steal_share=stolen,
                facts={**_grown(counted, await self._counters()), **({} if joules is None else {"energy_j": joules})},
            ),
        )

    async def _start(self) -> None:
        """And once through all its ways, before anything counts: then it is known whether it tells token ids, which
        servers of others may refuse to."""
        if self._tells_token_ids is not None:
            return
        plan = self._all
        if self._plan is not None:
            self._running = await self._stack.enter_async_context(started(self._plan, plan.served, plan.ends))
        warm = plan.lists.of(plan.workloads[0].name, 20.0, 4, repetition=WARM)
        self._tells_token_ids = True
        records = await self._offered(warm)
        if all(record.error is not None and record.error.startswith("HTTP 4") for record in records):
            self._tells_token_ids = False
            records = await self._offered(warm)
        if errors := [record.error for record in records if record.error is not None]:
            raise ArmFailed(f"{self.name}: {len(errors)} of {len(records)} first requests failed: {errors[0]}")
        if self._running is not None:
            self._told.facts.setdefault(self.name, {}).update(self._running.memory())

    async def _offered(self, arrivals: ArrivalList) -> tuple[RequestRecord, ...]:
        with tempfile.TemporaryDirectory(prefix="headrace-load-") as folder:
            order = Order(
                url=self._url,
                model=SERVED if self._target is None else self._target.model,
                arrivals=arrivals,
                out=f"{folder}/out.json",
                timeout_s=REQUEST_TIMEOUT_S,
                vocabulary=self._all.vocabulary,
                tells_token_ids=bool(self._tells_token_ids),
            )
            return await run_load(order, Path(folder), lambda num_ended: None)

    @property
    def _url(self) -> str:
        if self._target is not None:
            return self._target.url
        assert self._running is not None
        return self._running.url

    async def _counters(self) -> Mapping[str, float]:
        return {} if self._running is None else await self._running.counters()

    def _with_waterfalls(self, records: tuple[RequestRecord, ...]) -> tuple[RequestRecord, ...]:
        if self._running is None:
            return records
        known = self._running.waterfalls()
        return tuple(msgspec.structs.replace(record, waterfall=known.get(record.id)) for record in records)


def _grown(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Of what travelled: bytes of KV."""
    sent = [name for name in after if name.startswith("kv_bytes_sent")]
    return {"kv_bytes": sum(after[name] - before.get(name, 0.0) for name in sent)} if sent else {}
