"""A comparison as it goes on: sessions of arms, runs within them, files. Runs on one loop.

Resumed, it reads the runs that are there instead of making them again, and so comes to the same decisions.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from headrace.bench.comparison import Comparison, write_comparison
from headrace.bench.metrics import Slo, attainment, percentile, tpot_s, ttft_s
from headrace.bench.records import Run
from headrace.bench.workload import part
from headrace.cli.compare.asking import Ask, Plan, Told, Unusable
from headrace.cli.compare.course import (
    Point,
    Session,
    common_rates,
    first_rate,
    idle_list,
    mean_by_length,
    next_rate,
    on_grid,
    repetitions,
)

IDLE_FACTOR = 3.0
"""Budgets that nobody gave: so many times the longest first token, and the slowest pace, of one request at a time."""
IDLE_OF = 200  # requests, whose lengths those are picked from
QUICK_FACTORS = (1.0, 2.0)
"""Of the first rate, which is half of what devices could do that take one request at a time: below and above that."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Comparing:
    plan: Plan
    comparison: Comparison  # as it will be written, without what only the runs tell
    told: Told
    _asked: Ask | None = None  # the arm that runs

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
        contenders = self._contenders(await self._sweep(workloads, self._sweep_rate(begin)))
        rates = {workload: await self._rates(workload, contenders, begin) for workload in workloads}
        self.comparison = msgspec.structs.replace(self.comparison, rates=rates)
        sessions = repetitions(contenders, rates, plan.num_repetitions)
        self.told.progress.expect([len(session.points) * plan.seconds for session in sessions])
        for session in sessions:
            await self._session(session)
        self._write(is_whole=True)
        return self.comparison

    async def _idle(self) -> Run:
        """The longest of some requests, to know how long one takes; then all of them, one after another."""
        chunks = self.plan.colocated
        arm = chunks[-1] if chunks else self.plan.all_arms[0]
        workload = self.plan.workloads[0].name
        self.told.progress.say(f"{arm.name}: one request at a time")
        ask = await self._serving(arm.name)
        every = self.plan.lists.of(workload, 1.0, IDLE_OF, repetition=0)
        longest = part(idle_list(every, gap_s=0.0), nth=0, num_requests=1)
        alone = await ask(Point(workload=workload, rate=1.0, repetition=0), longest, under="idle")
        whole_s = max(record.token_s[-1] - record.arrival_s for record in alone.requests if record.token_s)
        gap_s = float(f"{1.1 * whole_s:.2g}")
        # Other tokens: the longest is not to be found in a prefix index.
        others = msgspec.structs.replace(idle_list(every, gap_s=gap_s), seed=every.seed + 1)
        return await ask(Point(workload=workload, rate=1 / gap_s, repetition=0), others, under="idle")

    async def _sweep(self, workloads: Sequence[str], rate: float) -> dict[str, list[Run]]:
        """By chunk size's arm; nothing where there is one."""
        chunks = self.plan.colocated
        points = [Point(workload=workload, rate=rate, repetition=1) for workload in workloads]
        # The last one was idle a moment ago, and still runs.
        swept = chunks[::-1] if len(chunks) > 1 else []
        return {arm.name: await self._session(Session(arm=arm.name, points=points)) for arm in swept}

    def _sweep_rate(self, begin: float) -> float:
        """One that all arms are asked at later, too, where it is known."""
        if self.plan.rates:
            return self.plan.rates[len(self.plan.rates) // 2]
        return on_grid(QUICK_FACTORS[0] * begin) if self.plan.is_quick else begin

    def _contenders(self, swept: Mapping[str, Sequence[Run]]) -> list[str]:
        """The best chunk size of the sweep, every split arm, every target."""
        chunks = self.plan.colocated
        others = [arm.name for arm in self.plan.all_arms if arm.kind != "colocated"]
        if not swept:
            return [*(arm.name for arm in chunks), *others]

        def rank(arm: str) -> tuple[float, float]:
            records = [record for run in swept[arm] for record in run.counted]
            return attainment(records, self.comparison.slo), -percentile([ttft_s(one) for one in records], 0.9)

        return [max((arm.name for arm in chunks), key=rank), *others]

    async def _rates(self, workload: str, arms: Sequence[str], begin: float) -> tuple[float, ...]:
        if self.plan.rates is not None:
            return self.plan.rates
        if self.plan.is_quick:
            return tuple(on_grid(factor * begin) for factor in QUICK_FACTORS)
        known: dict[str, dict[float, float]] = {}
        for arm in arms:
            self.told.progress.say(f"{arm}: the rate that it keeps up with, {workload}")
            by_rate = known.setdefault(arm, {})
            ask = await self._serving(arm)
            while (rate := next_rate(by_rate, begin)) is not None:
                try:
                    run = await ask(Point(workload=workload, rate=rate, repetition=1))
                except Unusable as error:  # told by what it has found so far
                    _log.warning("%s", error)
                    break
                by_rate[rate] = attainment(run.counted, self.comparison.slo)
        return common_rates(known)

    # ---- sessions and runs -------------------------------------------------------------------------------------

    async def _session(self, session: Session) -> list[Run]:
        """Those of its points that count."""
        runs = []
        self.told.progress.say(
            f"{session.arm}: {', '.join(f'{one.workload} at {one.rate:g}/s' for one in session.points)}"
        )
        ask = await self._serving(session.arm)
        for point in session.points:
            try:
                runs.append(await ask(point))
            except Unusable as error:
                _log.warning("%s", error)
        self._write(is_whole=False)
        return runs

    async def _serving(self, name: str) -> Ask:
        """Runs of this arm. It is started with the first that is really to be made; one that runs already goes on."""
        if self._asked is None or self._asked.name != name:
            await self._stop()
            self._asked = Ask(self.plan, self.told, name)
        return self._asked

    async def _stop(self) -> None:
        asked, self._asked = self._asked, None
        if asked is not None:
            await asked.stop()

    def _busy_s(self, idle: Run) -> float:
        """Seconds of a device for a request of the workload, on average: its prefill, and its part of decode steps that
        four share."""
        known = [
            (record.prompt_tokens, ttft_s(record) + (record.token_s[-1] - record.token_s[0]) / 4)
            for record in idle.requests
            if record.token_s
        ]
        every = self.plan.lists.of(idle.head.workload, 1.0, IDLE_OF, repetition=0)
        return mean_by_length(known, [one.prompt_tokens for one in every.arrivals])

    def _write(self, *, is_whole: bool) -> None:
        self.comparison = msgspec.structs.replace(
            self.comparison, is_whole=is_whole, rejected=tuple(self.told.rejected), facts=self.told.facts
        )
        write_comparison(self.plan.directory, self.comparison)


def _derived(idle: Run) -> tuple[Slo, str]:
    longest = max(ttft_s(record) for record in idle.requests)
    pace = max((each for record in idle.requests if (each := tpot_s(record)) is not None), default=1.0)
    slo = Slo(ttft_s=float(f"{IDLE_FACTOR * longest:.2g}"), tpot_s=float(f"{IDLE_FACTOR * pace:.2g}"))
    source = (
        f"derived: {IDLE_FACTOR:g} times the longest first token and the slowest pace of one request at a time in "
        f"{idle.head.arm}"
    )
    return slo, source
