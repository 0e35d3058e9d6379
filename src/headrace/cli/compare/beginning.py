"""What is to be compared, from what the command line said; then the comparison, or what is made of one."""

import importlib.metadata
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from headrace.bench.comparison import FILE, Arm, Comparison, Workload, read_comparison
from headrace.bench.metrics import Slo
from headrace.bench.prompts import vocabulary_of
from headrace.bench.workload import Fit
from headrace.cli import options as opt
from headrace.cli.compare.arms import ArmPlan, Served, colocated_arm, ratios, split_arm, told_commands
from headrace.cli.compare.asking import Plan, Target, Told
from headrace.cli.compare.comparing import Comparing
from headrace.cli.compare.energy import POWERCAP, Energy
from headrace.cli.compare.link import laid, read_link
from headrace.cli.compare.lists import Lists
from headrace.cli.compare.progress import Progress
from headrace.cli.fetching import fetch_model
from headrace.cli.interrupting import INTERRUPTED, run_unless_interrupted
from headrace.cli.machine import describe_machine
from headrace.errors import HeadraceError, InputError
from headrace.model.checkpoint import read_shape

INSTANCE = opt.INSTANCE_DEFAULTS
QUICK_CHUNKS, CHUNKS = (64, 256), (64, 128, 256, 512)
QUICK_SECONDS, SECONDS = 4.0, 30.0
QUICK_REPETITIONS, REPETITIONS = 3, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What the command line said."""

    quick: bool
    workload: Sequence[str]
    arrivals: str | None
    begin: float
    rates: tuple[float, ...]
    seconds: float | None
    repetitions: int | None
    ttft_ms: float | None
    tpot_ms: float | None
    max_prompt_tokens: int
    max_output_tokens: int
    seed: int
    chunks: tuple[float, ...]
    prefillers: tuple[float, ...]
    link: str | None
    target: Sequence[str]
    model: str
    dtype: str
    kv_memory: int
    max_running: int
    cpus: tuple[int, ...]
    out: Path | None
    resume: bool


def compare(given: Given) -> int:
    """-> the exit status. Raises HeadraceError."""
    directory, kept = _directory(given.out, is_resumed=given.resume)
    model_dir = fetch_model(given.model)
    devices = given.cpus or tuple(sorted(os.sched_getaffinity(0)))
    shaped = None if given.link is None else read_link(given.link)
    served = Served(
        model_dir=model_dir,
        dtype=given.dtype,
        cpus=devices,
        kv_memory_bytes=given.kv_memory,
        max_running=given.max_running,
        prefill_chunk_tokens=INSTANCE.chunk_tokens,
    )
    plans = _arms(
        served, given.chunks or (QUICK_CHUNKS if given.quick else CHUNKS), given.prefillers, is_quick=given.quick
    )
    shape = read_shape(model_dir)
    longest = min(shape.max_model_len, given.max_prompt_tokens + given.max_output_tokens)
    fit = Fit(
        max_prompt_tokens=given.max_prompt_tokens, max_output_tokens=given.max_output_tokens, max_model_len=longest
    )
    lists = Lists(given.workload or ["mixed"], given.arrivals, begin_s=given.begin, fit=fit, seed=given.seed)
    told = [lists.of(name, 1.0, 200, repetition=0) for name in lists.workloads]
    plan = Plan(
        directory=directory,
        served=served,
        arms=plans,
        targets=[_target(text, len(devices)) for text in given.target],
        workloads=[Workload(name=one.name, notes=one.notes) for one in told],
        lists=lists,
        seed=given.seed,
        seconds=given.seconds or (QUICK_SECONDS if given.quick else SECONDS),
        num_repetitions=given.repetitions or (QUICK_REPETITIONS if given.quick else REPETITIONS),
        slo=_slo(given.ttft_ms, given.tpot_ms),
        rates=given.rates or None,
        is_quick=given.quick,
        ends=None,
        vocabulary=vocabulary_of(shape.vocab_size),
    )
    comparison = _comparison(plan, model=given.model, link="none" if shaped is None else str(shaped))
    if kept is not None:
        comparison = _gone_on(kept, comparison)
    with ExitStack() as stack:
        if shaped is not None:
            plan = replace(plan, ends=stack.enter_context(laid(shaped)))
        try:
            is_whole = _compare(plan, comparison)
        except HeadraceError:
            sys.stderr.write(f"\nit ended early; to go on: {shlex.join(_resumed(directory))}\n")
            raise
        if not is_whole:
            sys.stderr.write(f"\ninterrupted; to go on: {shlex.join(_resumed(directory))}\n")
            return INTERRUPTED
    return _report(directory)


# ---- what is to be compared ------------------------------------------------------------------------------------


def _arms(served: Served, chunks: Sequence[float], prefillers: Sequence[float], *, is_quick: bool) -> list[ArmPlan]:
    """Colocated ones by chunk size; split ones, with and (but quick) without prefills by choice at the decoder."""
    splits = [int(one) for one in prefillers] or ratios(len(served.cpus))[: 1 if is_quick else 3]
    if wrong := [one for one in splits if one >= len(served.cpus)]:
        raise InputError("prefillers", f"must leave a decoder: {wrong[0]} of {len(served.cpus)} devices are given")
    plans = [colocated_arm(served, int(size)) for size in chunks]
    for num in splits:
        plans += [split_arm(served, num, local_prefill="cheaper")]
        plans += [] if is_quick else [split_arm(served, num, local_prefill="needed")]
    return plans


def _target(text: str, num_devices: int) -> Target:
    """`URL,MODEL[,DEVICES]`."""
    url, _, rest = text.partition(",")
    name, _, devices = rest.partition(",")
    if not name or (devices and not devices.isdecimal()) or devices == "0":
        raise InputError("target", f"must be URL,MODEL or URL,MODEL,DEVICES, is {text!r}")
    arm = Arm(name=f"target {url}", kind="target", devices=int(devices or num_devices))
    return Target(arm=arm, url=url, model=name)


def _slo(ttft_ms: float | None, tpot_ms: float | None) -> Slo | None:
    if (ttft_ms is None) != (tpot_ms is None):
        raise InputError("tpot_ms" if tpot_ms is None else "ttft_ms", "must be given with the other budget, or neither")
    return None if ttft_ms is None or tpot_ms is None else Slo(ttft_s=ttft_ms / 1e3, tpot_s=tpot_ms / 1e3)


def _comparison(plan: Plan, *, model: str, link: str) -> Comparison:
    known = {one.arm.name: told_commands(one, plan.served) for one in plan.arms}
    return Comparison(
        began=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join(["headrace", *sys.argv[1:]]),
        versions={name: importlib.metadata.version(name) for name in ("headrace", "torch", "numpy")},
        machine=describe_machine(),
        model=f"{model}, {plan.served.dtype}",
        seed=plan.seed,
        slo=plan.slo or Slo(ttft_s=0.0, tpot_s=0.0),
        slo_source="given" if plan.slo else "",
        link=link,
        arms=tuple(msgspec.structs.replace(arm, commands=known.get(arm.name, ())) for arm in plan.all_arms),
        workloads=tuple(plan.workloads),
        rates={},
        repetitions=plan.num_repetitions,
        not_measured={} if Energy().is_counted else {"energy": f"no counter in {POWERCAP} that can be read"},
    )


def _directory(out: Path | None, *, is_resumed: bool) -> tuple[Path, Comparison | None]:
    """With the comparison that is there, of one that goes on."""
    if is_resumed:
        if out is None:
            raise InputError("out", "must say which comparison is to go on: --resume --out DIR")
        return out, read_comparison(out)
    directory = out or Path("comparisons") / datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    if (directory / FILE).exists():
        raise InputError("out", f"{directory} holds a comparison already: give --resume to go on with it")
    return directory, None


def _gone_on(kept: Comparison, now: Comparison) -> Comparison:
    """What was begun, with what was measured of it. Raises InputError where this is another comparison."""
    for name in ("model", "seed", "link", "repetitions", "workloads"):
        ours, theirs = getattr(now, name), getattr(kept, name)
        if ours != theirs:
            raise InputError("resume", f"must be given with the options of the comparison, whose {name} is another one")
    if [arm.name for arm in now.arms] != [arm.name for arm in kept.arms]:
        raise InputError(
            "resume", f"must be given with the arms of the comparison: {', '.join(a.name for a in kept.arms)}"
        )
    return msgspec.structs.replace(now, began=kept.began, command=kept.command, facts=kept.facts)


def _resumed(directory: Path) -> list[str]:
    words = [word for word in sys.argv[1:] if word != "--resume"]
    given = ["--out", str(directory)] if "--out" not in words else []
    return ["headrace", *words, *given, "--resume"]


# ---- running it ------------------------------------------------------------------------------------------------


def _compare(plan: Plan, comparison: Comparison) -> bool:
    """-> whether it came to its end; False: Ctrl-C or SIGTERM did, and every process has ended."""
    guess_s = plan.seconds * (len(plan.arms) + 4 * plan.num_repetitions * max(1, len(plan.workloads)))
    with Progress(guess_s) as progress:
        told = Told(progress=progress, facts=dict(comparison.facts))
        comparing = Comparing(plan=plan, comparison=comparison, told=told)
        return run_unless_interrupted(comparing.run()) is not None


# ---- what is made of it ----------------------------------------------------------------------------------------


def _report(directory: Path) -> int:
    # Function-local: plots take a second to load.
    from headrace.bench.report.writing import write_report

    sys.stdout.write(write_report(directory))
    return 0


def recheck_in(directory: Path) -> int:
    from headrace.bench.report.figures import recheck

    differences = recheck(directory)
    for text in differences:
        sys.stdout.write(f"{text}\n")
    if not differences:
        sys.stdout.write("every figure and the verdict are what the records say\n")
    return 1 if differences else 0


def against(one: Path, other: Path) -> int:
    from headrace.bench.report.against import compared

    sys.stdout.write(compared(one, other))
    return 0
