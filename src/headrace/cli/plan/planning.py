"""The question, from what the command line said; then the answer, and what is made of it."""

import importlib.metadata
import shlex
import sys
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

from rich.console import Console
from rich.status import Status

from headrace.bench.metrics import Slo
from headrace.bench.synthetic import KINDS
from headrace.bench.workload import ArrivalList, Fit
from headrace.cli.compare.lists import Lists
from headrace.cli.plan.deployment_file import as_toml, require_writable
from headrace.cli.plan.report.terminal import screen
from headrace.cli.plan.report.told import ChunkTold, PlanTold, deployment_told
from headrace.deploy.known import known_config
from headrace.errors import InputError
from headrace.model.checkpoint import read_shape
from headrace.model.locate import existing_path
from headrace.model.shape import ModelShape
from headrace.planner.costs.hardware import Hardware, read_hardware
from headrace.planner.scenario import LinkModel
from headrace.planner.search.answer import Answer, Question, answered
from headrace.planner.search.candidate import Objective, Surroundings
from headrace.planner.search.frontier import frontier
from headrace.planner.search.region import region
from headrace.planner.search.sensitivity import cases
from headrace.planner.search.site import USABLE, Lengths, Site
from headrace.planner.search.wanted import ListOf, Wanted

GATEWAY_S, HAND_OVER_S = 0.002, 0.002
"""As measured on CPUs (docs/measurements.md): both are of the host, whatever computes."""
ROOFLINE_ERROR = 0.08
ERROR_SOURCE = (
    "what a roofline told of published profiles that were left out of its fit: 6 % on average, 13 % for one in ten "
    "(docs/measurements.md); software and mixtures of experts less certain"
)
HOST_SHARE = 0.8
"""Of the fabric inside a host, what copies between two devices reach."""
HOST_LATENCY_S = 5e-6

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
    seed: int
    out: Path | None
    write: Path | None


def plan(given: Given) -> int:
    """-> the exit status: 1 where nothing holds. Raises InputError."""
    if given.write is not None:
        require_writable(given.write)
    hardware, shape = read_hardware(given.hardware), _shape(given.model)
    lists = _lists(given, shape)
    wanted = Wanted(
        slo=Slo(ttft_s=given.ttft_s, tpot_s=given.tpot_s),
        target=given.target,
        rate=given.rate,
        lists=_of_rates(lists, seconds=SECONDS, fewest=FEWEST),
    )
    shorter = replace(wanted, lists=_of_rates(lists, seconds=CURVE_SECONDS, fewest=CURVE_FEWEST))
    site = _site(given, hardware, shape, wanted)
    console = Console(stderr=True, highlight=False)
    counted = _Counted(console)
    with console.status("") as counted.status:
        question = Question(
            colocated=list(site.colocated()),
            split=list(site.split()),
            wanted=wanted,
            lengths=site.lengths,
            objective=cast("Objective", given.objective),
            error=ROOFLINE_ERROR,
            workload=given.workload if given.workload in KINDS else Path(given.workload).stem,
            with_one_less=given.with_one_less,
        )
        _require_shapes(question, given)
        answer = answered(question, say=counted.say)
        told = _told(given, question, answer, shorter, counted)
    page = None
    if given.out is not None:
        # Function-local: plots take a second to load.
        from headrace.cli.plan.report.writing import write_plan

        page = str(write_plan(given.out, told))
    sys.stdout.write(screen(told, page))
    if given.write is not None:
        given.write.write_text(as_toml(told, hardware=hardware, model=given.model, link=given.link))
        sys.stdout.write(f"  deployment: {given.write}\n")
    return 0 if told.best is not None else 1


class _Counted:
    """What is simulated, for a person who waits."""

    def __init__(self, console: Console) -> None:
        self.num = 0
        self.status: Status | None = None
        self._console = console

    def say(self, text: str) -> None:
        self.num += 1
        if self.status is not None:
            self.status.update(f"{self.num} simulated; {text}")


# ---- the question ----------------------------------------------------------------------------------------------


def _shape(model: str) -> ModelShape:
    directory = existing_path(model)
    if directory is None:
        return ModelShape.from_config(known_config(model))
    if not (directory / "config.json").is_file():
        raise InputError("model", f"must be a directory with a config.json, is {directory}")
    return read_shape(directory)


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


def _site(given: Given, hardware: Hardware, shape: ModelShape, wanted: Wanted) -> Site:
    prefill, decode = hardware.device(given.device), hardware.device(given.decode_device)
    slower = min(prefill.fabric_bytes_s, decode.fabric_bytes_s)
    return Site(
        shape=shape,
        dtype="bf16",
        prefill=prefill,
        decode=decode,
        around=Surroundings(
            routed=hardware.link(given.link),
            same_host=LinkModel(bytes_s=HOST_SHARE * slower, latency_s=HOST_LATENCY_S),
            gateway_s=GATEWAY_S,
            hand_over_s=HAND_OVER_S,
        ),
        lengths=Lengths.of(wanted.lists(given.rate)),
        slo=wanted.slo,
    )


def _require_shapes(question: Question, given: Given) -> None:
    if not question.colocated and not question.split:
        names = " and ".join(dict.fromkeys((given.device, given.decode_device)))
        raise InputError(
            "device",
            f"must hold {given.model} and {question.lengths.longest:,} tokens on one host, with steps of at most "
            f"{1e3 * given.tpot_s:g} ms (--tpot-ms); {names} does not",
        )


# ---- the answer ------------------------------------------------------------------------------------------------


def _told(given: Given, question: Question, answer: Answer, shorter: Wanted, counted: _Counted) -> PlanTold:
    best, wanted = answer.best, question.wanted
    has_report = given.out is not None
    colocated, split = (None if found is None else found.candidate for found in (answer.colocated, answer.split))
    curve = frontier(colocated, split, shorter, question.lengths, counted.say) if has_report else ()
    cells = region(question.colocated, question.split, wanted.slo) if has_report else ()
    devices = given.device if given.device == given.decode_device else f"{given.device} and {given.decode_device}"
    return PlanTold(
        command=shlex.join(["headrace", *sys.argv[1:]]),
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        version=importlib.metadata.version("headrace"),
        model=given.model,
        devices=devices,
        link=given.link,
        workload=question.workload,
        notes=wanted.lists(given.rate).notes,
        rate=given.rate,
        slo=wanted.slo,
        target=wanted.target,
        objective=question.objective,
        is_with_one_less=question.with_one_less,
        error=question.error,
        error_source=ERROR_SOURCE,
        assumed=_assumed(),
        verdict=answer.verdict,
        chunks=tuple(ChunkTold(chunk_tokens=size, least=deployment_told(found)) for size, found in answer.chunks),
        colocated=deployment_told(answer.colocated),
        split=deployment_told(answer.split),
        best=deployment_told(best),
        cases=() if best is None else tuple(cases(best.candidate, wanted)),
        frontier=tuple(curve),
        region=tuple(cells),
        num_simulated=counted.num,
    )


def _assumed() -> tuple[str, ...]:
    return (
        "headrace computes on CPUs so far: no engine of its has run on such a device. Step times are a roofline's, at "
        "shares of the peaks that are fitted to published profiles, with an engine that replays decode steps as graphs "
        "(hardware.toml says which numbers are fitted and which assumed).",
        "Prices and watts are round figures: give your own with --hardware.",
        f"Gateway {1e3 * GATEWAY_S:g} ms, hand-over {1e3 * HAND_OVER_S:g} ms; {USABLE:.0%} of a device's memory for "
        f"weights and KV; answers of the stated lengths, one token a step.",
        "Groups of a data-parallel decoder are simulated as instances that do not wait for each other.",
    )


USABLE_TEXT = (
    "nine tenths of a device's memory for weights and KV, no draft model, greedy answers of the stated lengths"
)
