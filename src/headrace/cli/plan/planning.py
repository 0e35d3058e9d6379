"""The question, from what the command line said; then the answer, and what is made of it."""

import importlib.metadata
import shlex
import sys
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self, cast

import msgspec
from rich.console import Console

from headrace.bench.metrics import Slo
from headrace.bench.workload import ArrivalList, Fit
from headrace.cli.check import shape_of
from headrace.cli.compare.lists import Lists
from headrace.cli.plan.deployment_file import as_toml, require_writable
from headrace.cli.plan.ground import Ground, as_profiled, on_devices
from headrace.cli.plan.report.terminal import screen
from headrace.cli.plan.report.told import ChunkTold, PlanTold, deployment_told
from headrace.model.shape import ModelShape
from headrace.planner.costs.hardware import read_hardware
from headrace.planner.profile import Profile, read_profile
from headrace.planner.search.answer import Answer, Question, answered
from headrace.planner.search.candidate import Objective
from headrace.planner.search.frontier import FrontierPoint, frontier
from headrace.planner.search.region import region
from headrace.planner.search.sensitivity import cases
from headrace.planner.search.site import Lengths
from headrace.planner.search.wanted import ListOf, Wanted

SECONDS, FEWEST, MOST = 60.0, 500, 20_000
"""Of arrivals: so long, but so many requests at least and at most."""
CURVE_SECONDS, CURVE_FEWEST = 20.0, 300
"""The same of the points of a curve, of which there are many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    model: str
    rate: float
    ttft_s: float
    tpot_s: float
    workload: str
    arrivals: str | None
    begin_s: float
    max_prompt_tokens: int
    max_output_tokens: int
    target: float
    objective: str
    with_one_less: bool
    device: str
    decode_device: str
    link: str
    hardware: Path | None
    profile: Path | None
    seed: int
    out: Path | None
    write: Path | None


def plan(given: Given) -> int:
    """-> the exit status: 1 where nothing holds. Raises InputError."""
    if given.write is not None:
        require_writable(given.write)
    profile = None if given.profile is None else read_profile(given.profile)
    shape = shape_of(given.model if profile is None else profile.model)
    lists = _lists(given, shape)
    wanted = Wanted(
        slo=Slo(ttft_s=given.ttft_s, tpot_s=given.tpot_s),
        target=given.target,
        rate=given.rate,
        lists=_of_rates(lists, seconds=SECONDS, fewest=FEWEST),
    )
    lengths = Lengths.of(wanted.lists(given.rate))
    ground = _ground(given, profile, shape, lengths, wanted.slo)
    question = Question(
        colocated=ground.colocated,
        split=ground.split,
        wanted=wanted,
        lengths=lengths,
        objective=cast("Objective", given.objective),
        error=ground.error,
        workload=lists.workloads[0],
        with_one_less=given.with_one_less,
    )
    with _Counted() as counted:
        answer = answered(question, say=counted.say)
        told = _told(given, ground, question, answer)
        if given.out is not None:
            shorter = replace(wanted, lists=_of_rates(lists, seconds=CURVE_SECONDS, fewest=CURVE_FEWEST))
            told = msgspec.structs.replace(told, frontier=_curve(answer, shorter, lengths, counted))
            told = msgspec.structs.replace(told, region=tuple(region(ground.colocated, ground.split, wanted.slo)))
        told = msgspec.structs.replace(told, num_simulated=counted.num)
    page = None
    if given.out is not None:
        # Function-local: plots take a second to load.
        from headrace.cli.plan.report.writing import write_plan

        page = str(write_plan(given.out, told))
    sys.stdout.write(screen(told, page))
    if given.write is not None:
        given.write.write_text(as_toml(told, ground))
        sys.stdout.write(f"  deployment: {given.write}\n")
    return 0 if told.best is not None else 1


class _Counted:
    """What is simulated, for a person who waits: on a terminal as it changes."""

    def __init__(self) -> None:
        self.num = 0
        self._status = Console(stderr=True, highlight=False).status("")

    def say(self, text: str) -> None:
        self.num += 1
        self._status.update(f"{self.num} simulated; {text}")

    def __enter__(self) -> Self:
        self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._status.stop()


# ---- the question ----------------------------------------------------------------------------------------------


def _lists(given: Given, shape: ModelShape) -> Lists:
    longest = shape.max_model_len
    fit = Fit(
        max_prompt_tokens=min(given.max_prompt_tokens, longest - 2),
        max_output_tokens=min(given.max_output_tokens, longest - 2),
        max_model_len=longest,
    )
    return Lists([given.workload], given.arrivals, begin_s=given.begin_s, fit=fit, seed=given.seed)


def _of_rates(lists: Lists, *, seconds: float, fewest: int) -> ListOf:
    """Each made once."""
    known: dict[float, ArrivalList] = {}

    def of(rate: float) -> ArrivalList:
        if rate not in known:
            num = int(min(MOST, max(fewest, seconds * rate)))
            known[rate] = lists.of(lists.workloads[0], rate, num, repetition=0)
        return known[rate]

    return of


def _ground(given: Given, profile: Profile | None, shape: ModelShape, lengths: Lengths, slo: Slo) -> Ground:
    hardware = read_hardware(given.hardware)
    if profile is not None and given.profile is not None:
        return as_profiled(profile, given.profile, hardware, lengths=lengths, slo=slo)
    return on_devices(
        hardware,
        model=given.model,
        shape=shape,
        device=given.device,
        decode_device=given.decode_device,
        link=given.link,
        lengths=lengths,
        slo=slo,
    )


# ---- the answer ------------------------------------------------------------------------------------------------


def _told(given: Given, ground: Ground, question: Question, answer: Answer) -> PlanTold:
    best, wanted = answer.best, question.wanted
    return PlanTold(
        command=shlex.join(["headrace", *sys.argv[1:]]),
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        version=importlib.metadata.version("headrace"),
        model=ground.model,
        devices=ground.devices,
        link=ground.link,
        workload=question.workload,
        notes=wanted.lists(given.rate).notes,
        rate=given.rate,
        slo=wanted.slo,
        target=wanted.target,
        objective=question.objective,
        is_with_one_less=question.with_one_less,
        error=ground.error,
        error_source=ground.error_source,
        is_measured=given.profile is not None,
        assumed=ground.assumed,
        verdict=answer.verdict,
        chunks=tuple(ChunkTold(chunk_tokens=size, least=deployment_told(found)) for size, found in answer.chunks),
        colocated=deployment_told(answer.colocated),
        split=deployment_told(answer.split),
        best=deployment_told(best),
        cases=() if best is None else tuple(cases(best.candidate, wanted)),
    )


def _curve(answer: Answer, wanted: Wanted, lengths: Lengths, counted: _Counted) -> tuple[FrontierPoint, ...]:
    colocated, split = (None if found is None else found.candidate for found in (answer.colocated, answer.split))
    return tuple(frontier(colocated, split, wanted, lengths, counted.say))
