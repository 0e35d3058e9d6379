"""What is to be profiled, from what the command line said; then the measuring, the file and the screen."""

import importlib.metadata
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

from headrace.bench.prompts import vocabulary_of
from headrace.cli.compare.arms import ArmPlan, Served, colocated_arm, split_arm
from headrace.cli.compare.link import Link, laid, read_link
from headrace.cli.compare.progress import Progress
from headrace.cli.fetching import fetch_model
from headrace.cli.interrupting import INTERRUPTED, run_unless_interrupted
from headrace.cli.machine import describe_machine
from headrace.cli.profile.calibrating import Calibrating, Measured
from headrace.cli.profile.fitting import (
    Alone,
    Fitted,
    came_by_themselves,
    fit_link,
    fit_steps,
    left_over_s,
    median_or,
    were_alone,
)
from headrace.cli.profile.report import rendered
from headrace.errors import InputError
from headrace.kvcache.layout import KVDtype
from headrace.messenger.plan import Side, plan_transfer
from headrace.model.checkpoint import read_shape
from headrace.model.shape import ModelShape
from headrace.planner.profile import Profile, StepProfile, write_profile
from headrace.planner.scenario import KvModel, Role
from headrace.roles.options import InstanceOptions
from headrace.roles.pool_plan import plan_pool, plan_sharding


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What the command line said."""

    seconds: float
    out: Path
    link: str | None
    model: str
    dtype: str
    kv_memory: int
    max_running: int
    chunk_tokens: int
    cpus: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Of every instance: all have the same memory. `longest`: tokens of a request."""

    num_pages: int
    page_size: int
    longest: int
    kv: KvModel


def profile(given: Given) -> int:
    """-> the exit status. Raises HeadraceError."""
    if not given.out.absolute().parent.is_dir():
        raise InputError("out", f"must be in a folder that exists, is {given.out}")
    devices = given.cpus or tuple(sorted(os.sched_getaffinity(0)))
    if len(devices) < 2:
        raise InputError("cpus", f"must be two devices at the least, one for each phase, is {len(devices)}")
    shaped = None if given.link is None else read_link(given.link)
    model_dir = fetch_model(given.model)
    shape = read_shape(model_dir)
    pool = _pool(shape, given, model_dir)
    served = Served(
        model_dir=model_dir,
        dtype=given.dtype,
        cpus=devices,
        kv_memory_bytes=given.kv_memory,
        max_running=given.max_running,
        prefill_chunk_tokens=given.chunk_tokens,
        log_level="debug",
    )
    machine, now = describe_machine(), datetime.now(UTC)
    plans = [colocated_arm(served, given.chunk_tokens), split_arm(served, 1, local_prefill="needed")]
    with ExitStack() as stack:
        ends = None if shaped is None else stack.enter_context(laid(shaped))
        progress = stack.enter_context(Progress(len(plans) * given.seconds))
        calibrating = Calibrating(
            served=served,
            ends=ends,
            longest=pool.longest,
            seconds=given.seconds,
            vocabulary=vocabulary_of(shape.vocab_size),
            progress=progress,
        )
        measured = run_unless_interrupted(calibrating.run(plans))
    if measured is None:
        sys.stderr.write("\ninterrupted; nothing was written\n")
        return INTERRUPTED
    colocated, split = measured
    gateway_s = _gateway_s(colocated)
    found = Profile(
        headrace=importlib.metadata.version("headrace"),
        measured=now.isoformat(timespec="seconds"),
        machine=machine,
        model=given.model,
        dtype=given.dtype,
        page_size=pool.page_size,
        num_layers=pool.kv.num_layers,
        page_bytes=pool.kv.page_bytes,
        page_messages=pool.kv.page_messages,
        steps={role: _told(one, given, pool) for role, one in _fitted(plans, colocated, split).items()},
        gateway_s=gateway_s,
        hand_over_s=_hand_over_s(split, gateway_s=gateway_s),
        link=fit_link(
            _alone(split, pool, chunk_tokens=given.chunk_tokens),
            num_layers=pool.kv.num_layers,
            bytes_s=None if shaped is None else _bytes_s(shaped),
        ),
    )
    write_profile(given.out, found)
    sys.stdout.write(rendered(found, given.out))
    return 0


def _pool(shape: ModelShape, given: Given, model_dir: Path) -> Pool:
    """Raises InputError where nothing fits."""
    options = InstanceOptions(
        role="decoder",
        name="",
        gateways=(),
        model_dir=model_dir,
        model="",
        dtype=cast("KVDtype", given.dtype),
        max_running=given.max_running,
        chunk_tokens=given.chunk_tokens,
        kv_memory_bytes=given.kv_memory,
    )
    layout, longest = plan_pool(shape, options)
    side = Side(sharding=plan_sharding(shape, options), pool=layout)
    return Pool(
        num_pages=layout.num_pages,
        page_size=options.page_size,
        longest=longest,
        kv=KvModel.of(plan_transfer(side, side, group=0, seed=0)),
    )


def _bytes_s(link: Link) -> float:
    return link.bits_per_s / 8


# ---- from what was measured ------------------------------------------------------------------------------------


def _fitted(plans: Sequence[ArmPlan], colocated: Measured, split: Measured) -> dict[Role, Fitted]:
    names: dict[Role, list[str]] = {}
    for plan in plans:
        for instance in plan.instances:
            names.setdefault(instance.role, []).append(instance.name)
    steps = {**colocated.steps, **split.steps}
    timed = {role: [one for name in each for one in steps.get(name, ())] for role, each in names.items()}
    # A decoder that computes a prompt by itself does what a colocated one does; it hardly ever does.
    chunks = [one for one in timed["colocated"] if one.size.chunk_tokens]
    beside = {"decoder": chunks}
    return {role: fit_steps(role, each, beside.get(role, ())) for role, each in timed.items()}


def _told(fitted: Fitted, given: Given, pool: Pool) -> StepProfile:
    cost = fitted.cost
    return StepProfile(
        step_s=cost.step_s,
        row_s=cost.row_s,
        token_s=cost.token_s,
        key_s=cost.key_s,
        pair_s=cost.pair_s,
        num_steps=fitted.num_steps,
        error_p50=fitted.error_p50,
        error_p90=fitted.error_p90,
        chunk_tokens=given.chunk_tokens,
        max_running=given.max_running,
        num_pages=pool.num_pages,
    )


def _gateway_s(colocated: Measured) -> float:
    """One way. What is told of a colocated instance's requests is its own: the rest is under way."""
    beyond = left_over_s(came_by_themselves(colocated.records), colocated.parts_of, ("prefill", "first step"))
    return median_or(beyond, 0.0) / 2


def _hand_over_s(split: Measured, *, gateway_s: float) -> float:
    """With all that only this way takes: a lease, and a ticket. A decoder that runs others begins no step for it at
    once, which a simulation knows: so it is of those that were alone."""
    told = ("prefiller queue", "prefill", "exposed transfer", "first step")
    beyond = left_over_s(were_alone(split.records), split.parts_of, told)
    return max(0.0, median_or(beyond, 0.0) - 2 * gateway_s)


def _alone(split: Measured, pool: Pool, *, chunk_tokens: int) -> list[Alone]:
    found = []
    for record in were_alone(split.records):
        parts = split.parts_of(record) or {}
        if "exposed transfer" in parts:
            num_tokens = record.prompt_tokens - 1
            last = num_tokens % chunk_tokens or chunk_tokens
            bytes_of_token = pool.kv.page_bytes / pool.page_size
            found.append(
                Alone(
                    num_bytes=round(num_tokens * bytes_of_token),
                    last_bytes=round(min(last, num_tokens) * bytes_of_token),
                    prefill_s=parts.get("prefill", 0.0) / 1e3,
                    exposed_s=parts["exposed transfer"] / 1e3,
                )
            )
    return found
