"""A comparison as it goes on: sessions of arms, runs within them, files. Runs on one loop.

Resumed, it reads the runs that are there instead of making them again, and so comes to the same decisions.
"""

import asyncio
import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from headrace.bench.comparison import (
    Arm,
    Comparison,
    Rejected,
    Workload,
    arrivals_file,
    run_file,
    write_comparison,
)
from headrace.bench.load.judging import judge_run
from headrace.bench.load.process import Order, run_load
from headrace.bench.metrics import Slo, attainment, percentile, tpot_s, ttft_s
from headrace.bench.records import RequestRecord, Run, RunEnd, RunHead, read_run, write_run
from headrace.bench.workload import ArrivalList, first
from headrace.cli.compare.arms import SERVED, ArmPlan, Served
from headrace.cli.compare.course import (
    Point,
    Session,
    common_rates,
    first_rate,
    idle_list,
    mean_by_length,
    next_rate,
    num_requests,
    num_warm,
    on_grid,
    repetitions,
)
from headrace.cli.compare.energy import Energy
from headrace.cli.compare.link import Ends
from headrace.cli.compare.progress import Progress
from headrace.cli.compare.running import RunningArm, started
from headrace.cli.machine import steal_share, ticks
from headrace.errors import HeadraceError

IDLE_FACTOR = 2.0
"""Budgets that nobody gave: so many times the longest first token, and the slowest pace, of one request at a time."""
IDLE_OF = 200  # requests, whose lengths those are picked from
QUICK_FACTORS = (1.0, 2.0)
"""Of the first rate, which is half of what devices could do that take one request at a time: below and above that."""
FEWEST_REQUESTS = 10
REQUEST_TIMEOUT_S = 120.0
TRIES = 2
MAX_SEED = 1_000_000

Make = Callable[[str, float, int, int], ArrivalList]
"""Workload, rate, number of requests, seed -> the list."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server that runs already: an arm without processes of ours."""

    arm: Arm
    url: str
    model: str
    tells_token_ids: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`slo` None: derived. `rates` None: searched (or, `is_quick`, two that follow from the idle run)."""

    directory: Path
    served: Served
    arms: Sequence[ArmPlan]
    targets: Sequence[Target]
    workloads: Sequence[Workload]
    make: Make
    seed: int
    seconds: float
    num_repetitions: int
    slo: Slo | None
    rates: tuple[float, ...] | None
    is_quick: bool
    ends: Ends | None
    vocabulary: tuple[int, int]


class Unusable(HeadraceError):
    """A run failed itself each time that it was tried, and nothing can be derived without it."""


@dataclass(slots=True, kw_only=True)
class Comparing:
    plan: Plan
    comparison: Comparison  # as it will be written, without what only the runs tell
    progress: Progress
    rejected: list[Rejected] = field(default_factory=list)
    facts: dict[str, dict[str, float]] = field(default_factory=dict)
    _asked: "Ask | None" = None  # the arm that runs

    # ---- the course --------------------------------------------------------------------------------------------

    async def run(self) -> Comparison:
        """-> as it stands at the end; written, too. Raises HeadraceError. However it ends, no arm runs any more."""
        try:
            return await self._run()
        finally:
            await self._stop()

    async def _run(self) -> Comparison:
        plan = self.plan
        self._write(is_whole=False)
        idle = await self._idle()
        slo, source = (plan.slo, "given") if plan.slo is not None else _derived(idle)
        self.comparison = msgspec.structs.replace(self.comparison, slo=slo, slo_source=source)
        begin = (
            plan.rates[0] if plan.rates else first_rate(num_devices=len(plan.served.cpus), busy_s=self._busy_s(idle))
        )
        workloads = [workload.name for workload in plan.workloads]
        await self._sweep(workloads, self._sweep_rate(begin))
        contenders = self._contenders(workloads)
        rates = {workload: await self._rates(workload, contenders, begin) for workload in workloads}
        self.comparison = msgspec.structs.replace(self.comparison, rates=rates)
        sessions = repetitions(contenders, rates, plan.num_repetitions)
        self.progress.expect([len(session.points) * plan.seconds for session in sessions])
        for session in sessions:
            await self._session(session)
        self._write(is_whole=True)
        return self.comparison

    async def _idle(self) -> Run:
        """The longest of some requests, to know how long one takes; then all of them, one after another."""
        chunks = [one.arm for one in self.plan.arms if one.arm.kind == "colocated"]
        arm = chunks[-1] if chunks else self._all_arms[0]
        workload = self.plan.workloads[0].name
        self.progress.say(f"{arm.name}: one request at a time")
        ask = await self._serving(arm.name)
        every = self.plan.make(workload, 1.0, IDLE_OF, self.plan.seed)
        longest = first(idle_list(every, gap_s=0.0), 1)
        alone = await ask(self._point(workload, 1.0, 0), longest, "idle")
        whole_s = max(record.token_s[-1] - record.arrival_s for record in alone.requests if record.token_s)
        gap_s = float(f"{1.1 * whole_s:.2g}")
        # Other tokens: the longest is not to be found in a prefix index.
        others = msgspec.structs.replace(idle_list(every, gap_s=gap_s), seed=self.plan.seed + MAX_SEED)
        return await ask(self._point(workload, 1 / gap_s, 0), others, "idle")

    async def _sweep(self, workloads: Sequence[str], rate: float) -> None:
        chunks = [one.arm for one in self.plan.arms if one.arm.kind == "colocated"]
        points = [self._point(workload, rate, 1) for workload in workloads]
        # The last one was idle a moment ago, and still runs.
        for arm in chunks[::-1] if len(chunks) > 1 else []:
            await self._session(Session(arm=arm.name, points=points))

    def _sweep_rate(self, begin: float) -> float:
        """One that all arms are asked at later, too, where it is known."""
        if self.plan.rates:
            return self.plan.rates[len(self.plan.rates) // 2]
        return on_grid(QUICK_FACTORS[0] * begin) if self.plan.is_quick else begin

    def _contenders(self, workloads: Sequence[str]) -> list[str]:
        """The best chunk size of the sweep, every split arm, every target."""
        chunks = [one.arm for one in self.plan.arms if one.arm.kind == "colocated"]
        others = [arm.name for arm in self._all_arms if arm.kind != "colocated"]
        if len(chunks) < 2:
            return [*(arm.name for arm in chunks), *others]

        def rank(arm: Arm) -> tuple[float, float]:
            runs = [run for run in self._runs_of(arm) if run.head.workload in workloads]
            records = [record for run in runs for record in run.requests[run.head.num_warm :]]
            return attainment(records, self.comparison.slo), -percentile([ttft_s(one) for one in records], 0.9)

        return [max(chunks, key=rank).name, *others]

    async def _rates(self, workload: str, arms: Sequence[str], begin: float) -> tuple[float, ...]:
        if self.plan.rates is not None:
            return self.plan.rates
        if self.plan.is_quick:
            return tuple(on_grid(factor * begin) for factor in QUICK_FACTORS)
        known: dict[str, dict[float, float]] = {}
        for arm in arms:
            self.progress.say(f"{arm}: the rate that it keeps up with, {workload}")
            by_rate = known.setdefault(arm, {})
            ask = await self._serving(arm)
            while (rate := next_rate(by_rate, begin)) is not None:
                run = await ask(self._point(workload, rate, 1))
                by_rate[rate] = attainment(run.requests[run.head.num_warm :], self.comparison.slo)
        return common_rates(known)

    # ---- sessions and runs -------------------------------------------------------------------------------------

    async def _session(self, session: Session) -> None:
        self.progress.say(f"{session.arm}: {', '.join(f'{one.workload} at {one.rate:g}/s' for one in session.points)}")
        ask = await self._serving(session.arm)
        for point in session.points:
            try:
                await ask(point)
            except Unusable as error:
                _log.warning("%s", error)
        self._write(is_whole=False)

    async def _serving(self, name: str) -> "Ask":
        """Runs of this arm. It is started with the first that is really to be made; one that runs already goes on."""
        if self._asked is None or self._asked.name != name:
            await self._stop()
            self._asked = Ask(self, name)
        return self._asked

    async def _stop(self) -> None:
        asked, self._asked = self._asked, None
        if asked is not None:
            await asked.stop()

    def _point(self, workload: str, rate: float, repetition: int) -> Point:
        return Point(workload=workload, rate=rate, repetition=repetition)

    def _busy_s(self, idle: Run) -> float:
        """Seconds of a device for a request of the workload, on average: its prefill, and its part of decode steps that
        four share."""
        known = [
            (record.prompt_tokens, ttft_s(record) + (record.token_s[-1] - record.token_s[0]) / 4)
            for record in idle.requests
            if record.token_s
        ]
        every = self.plan.make(idle.head.workload, 1.0, IDLE_OF, self.plan.seed)
        return mean_by_length(known, [one.prompt_tokens for one in every.arrivals])

    @property
    def _all_arms(self) -> list[Arm]:
        return [*(one.arm for one in self.plan.arms), *(one.arm for one in self.plan.targets)]

    def _runs_of(self, arm: Arm) -> list[Run]:
        return [read_run(file) for file in sorted((self.plan.directory / "runs" / arm.slug).rglob("*.jsonl"))]

    def _write(self, *, is_whole: bool) -> None:
        self.comparison = msgspec.structs.replace(
            self.comparison, is_whole=is_whole, rejected=tuple(self.rejected), facts=self.facts
        )
        write_comparison(self.plan.directory, self.comparison)


class Ask:
    """Runs of one arm, which is started with the first that is not on file."""

    def __init__(self, comparing: Comparing, name: str) -> None:
        self.name = name
        self._comparing = comparing
        self._plan = next((one for one in comparing.plan.arms if one.arm.name == name), None)
        self._target = next((one for one in comparing.plan.targets if one.arm.name == name), None)
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

    async def __call__(self, point: Point, given: ArrivalList | None = None, kind: str = "runs") -> Run:
        """The run, from its file where it is there; of the workload's arrivals, or those that are given. Raises
        Unusable when it failed itself each time."""
        plan = self._comparing.plan
        file = run_file(plan.directory, self._arm, point.workload, point.rate, point.repetition)
        if kind != "runs":
            file = plan.directory / kind / file.relative_to(plan.directory / "runs")
        if file.exists():
            self._comparing.progress.advance(plan.seconds)
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
                self._comparing.progress.advance(plan.seconds)
                return run
        self._comparing.rejected.append(
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
        plan = self._comparing.plan
        num = num_requests(point.rate, plan.seconds, fewest=FEWEST_REQUESTS)
        seed = (plan.seed * 1009 + point.repetition) % MAX_SEED
        return plan.make(point.workload, point.rate, num, seed)

    async def _made(self, point: Point, arrivals: ArrivalList) -> Run:
        await self._start()
        began, before, counted, energy = datetime.now(UTC), ticks(), await self._counters(), Energy()
        with tempfile.TemporaryDirectory(prefix="headrace-load-") as folder:
            order = Order(
                url=self._url,
                model=SERVED if self._target is None else self._target.model,
                arrivals=arrivals,
                out=f"{folder}/out.json",
                timeout_s=REQUEST_TIMEOUT_S,
                vocabulary=self._comparing.plan.vocabulary,
                tells_token_ids=self._target is None or self._target.tells_token_ids,
            )
            records = await run_load(order, Path(folder), lambda num_ended: None)
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
        """And once through all its ways, before anything counts."""
        if self._plan is None or self._running is not None:
            return
        plan = self._comparing.plan
        self._running = await self._stack.enter_async_context(started(self._plan, plan.served, plan.ends))
        warm = plan.make(plan.workloads[0].name, 20.0, 4, MAX_SEED)
        with tempfile.TemporaryDirectory(prefix="headrace-load-") as folder:
            order = Order(
                url=self._url,
                model=SERVED,
                arrivals=warm,
                out=f"{folder}/out.json",
                timeout_s=REQUEST_TIMEOUT_S,
                vocabulary=plan.vocabulary,
            )
            await run_load(order, Path(folder), lambda num_ended: None)
        self._comparing.facts.setdefault(self._arm.name, {}).update(self._running.memory())

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


def _derived(idle: Run) -> tuple[Slo, str]:
    longest = max(ttft_s(record) for record in idle.requests)
    pace = max((each for record in idle.requests if (each := tpot_s(record)) is not None), default=1.0)
    slo = Slo(ttft_s=float(f"{IDLE_FACTOR * longest:.2g}"), tpot_s=float(f"{IDLE_FACTOR * pace:.2g}"))
    source = (
        f"derived: {IDLE_FACTOR:g} times the longest first token and the slowest pace of one request at a time in "
        f"{idle.head.arm}"
    )
    return slo, source
