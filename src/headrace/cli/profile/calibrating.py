"""Both arms while they run, one after the other: what is asked of them, and what their logs said of it.

Runs on a loop of its own; owns an arm's processes, and the client's, as long as they run.
"""

import asyncio
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.bench.load.process import Order, run_load
from headrace.bench.metrics import tpot_s, ttft_s
from headrace.bench.records import RequestRecord
from headrace.bench.workload import ArrivalList
from headrace.cli.compare.arms import SERVED, ArmPlan, Served
from headrace.cli.compare.gateway_log import read_parts
from headrace.cli.compare.link import Ends
from headrace.cli.compare.progress import Progress
from headrace.cli.compare.running import ArmFailed, RunningArm, started
from headrace.cli.profile.load import Asked, Pace, calibrating, probe
from headrace.cli.profile.step_log import Timed, begin_to_begin, read_steps

REQUEST_TIMEOUT_S = 120.0
SEED = 1
LOG_IS_WRITTEN_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Of one arm. `steps` by instance; `parts` of a request's time to first token, milliseconds, by its id."""

    records: Sequence[RequestRecord]
    steps: Mapping[str, Sequence[Timed]]
    parts: Mapping[str, dict[str, float]]

    def parts_of(self, record: RequestRecord) -> dict[str, float] | None:
        return self.parts.get(record.id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrating:
    """`longest`: tokens of a request; `seconds` of load for each arm."""

    served: Served
    ends: Ends | None
    longest: int
    seconds: float
    vocabulary: tuple[int, int]
    progress: Progress

    async def run(self, plans: Sequence[ArmPlan]) -> list[Measured]:
        """Raises ArmFailed. However it ends, no process of it is left."""
        measured = []
        for plan in plans:
            self.progress.say(f"{plan.arm.name}: starting")
            async with started(plan, self.served, self.ends) as running:
                measured.append(await self._measure(plan, running))
            self.progress.advance(self.seconds)
        return measured

    async def _measure(self, plan: ArmPlan, running: RunningArm) -> Measured:
        asked = self._asked(plan)
        self.progress.say(f"{plan.arm.name}: one request alone")
        first = await self._offered(running, probe(asked, seed=SEED))
        pace = _pace(first[0])
        self.progress.say(f"{plan.arm.name}: {self.seconds:.0f} s of load, low to high")
        load = calibrating(asked, pace, seconds=self.seconds, seed=SEED + 1)
        begin_s = time.monotonic() + load.alone_s  # the clock of every process here
        records = await self._offered(running, load.arrivals)
        await asyncio.sleep(LOG_IS_WRITTEN_S)
        log = running.log.read_text(errors="replace")
        return Measured(
            records=records,
            steps={name: begin_to_begin(steps, since_s=begin_s) for name, steps in read_steps(log).items()},
            parts=read_parts(log),
        )

    def _asked(self, plan: ArmPlan) -> Asked:
        num_prefillers, num_decoders = plan.arm.num_prefillers, plan.arm.num_decoders
        return Asked(
            num_prefilling=num_prefillers or num_decoders,
            num_decoding=num_decoders,
            is_split=num_prefillers > 0,
            longest=self.longest,
            max_running=self.served.max_running,
        )

    async def _offered(self, running: RunningArm, arrivals: ArrivalList) -> Sequence[RequestRecord]:
        with tempfile.TemporaryDirectory(prefix="headrace-load-") as folder:
            order = Order(
                url=running.url,
                model=SERVED,
                arrivals=arrivals,
                out=f"{folder}/out.json",
                timeout_s=REQUEST_TIMEOUT_S,
                vocabulary=self.vocabulary,
            )
            records = await run_load(order, Path(folder), lambda num_ended: None)
        if errors := [record.error for record in records if record.error is not None]:
            raise ArmFailed(f"{len(errors)} of {len(records)} requests failed: {errors[0]}")
        return records


def _pace(record: RequestRecord) -> Pace:
    """Of a first request, which tells of the start as well: rather too slow."""
    return Pace(token_s=ttft_s(record) / record.prompt_tokens, step_s=tpot_s(record) or ttft_s(record))
