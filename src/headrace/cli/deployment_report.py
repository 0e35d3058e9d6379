"""What `headrace status` shows of a Deployment: tables for people, JSON for machines. Pure."""

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec
from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from headrace.protocol.operator import Deployment, InstanceFacts, RequestFacts

MOST_ROWS = 40
"""Of requests, in a table for people."""
LEAST_WIDTH = len("draining")
UUID_DIGITS = 8
"""Shown of a uuid: enough to tell instances apart."""


def described(deployment: Deployment) -> str:
    """One JSON object; bytes in it are base64."""
    return msgspec.json.format(msgspec.json.encode(deployment)).decode()


def rendered(deployment: Deployment) -> Iterator[RenderableType]:
    gateway = deployment.gateway
    yield Text(f"{gateway.name} serves {gateway.model} at {gateway.url}, pid {gateway.pid}")
    yield _instances_table(deployment.instances) if deployment.instances else Text("no instance is here")
    if deployment.requests:
        yield Text(_counted(deployment))
        names = {instance.uuid: instance.name for instance in deployment.instances}
        yield _requests_table(deployment.requests[:MOST_ROWS], names)
    else:
        yield Text("no request is under way")


def _counted(deployment: Deployment) -> str:
    stages = Counter(request.stage for request in deployment.requests)
    number = deployment.num_requests
    shown = f", the first {MOST_ROWS} of them" if number > MOST_ROWS else ""
    return f"{number} request{'s' * (number != 1)}: {', '.join(f'{n} {stage}' for stage, n in stages.items())}{shown}"


def _instances_table(instances: Sequence[InstanceFacts]) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    for title in ("instance", "role", "standing", "pid", "running", "waiting", "free", "uuid"):
        is_number = title in ("pid", "running", "waiting", "free")
        table.add_column(
            title,
            justify="right" if is_number else "left",
            no_wrap=title != "standing",
            min_width=LEAST_WIDTH if title == "standing" else None,
        )
    for facts in instances:
        status = facts.status
        counts = (
            ("-",) * 3
            if status is None
            else tuple(f"{number:,}" for number in (status.num_running, status.num_waiting, status.num_free_pages))
        )
        table.add_row(facts.name, facts.role, _standing(facts), str(facts.pid), *counts, facts.uuid[:UUID_DIGITS])
    return table


def _standing(facts: InstanceFacts) -> str:
    match facts.standing:
        case "absent":
            return f"absent for {facts.silent_s:.0f} s"
        case "refused":
            return f"refused: {facts.refusal}"
        case standing:
            return standing


def _requests_table(requests: Sequence[RequestFacts], names: dict[str, str]) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    for title in ("request", "tier", "stage", "prefiller", "decoder", "prompt", "tokens"):
        is_number = title in ("prompt", "tokens")
        table.add_column(title, justify="right" if is_number else "left", overflow="fold", no_wrap=title != "request")
    for facts in requests:
        table.add_row(
            *(facts.request_id, facts.tier, facts.stage),
            *(names.get(uuid, uuid[:UUID_DIGITS]) if uuid else "-" for uuid in (facts.prefiller, facts.decoder)),
            *(f"{facts.num_prompt_tokens:,}", f"{facts.num_tokens:,}"),
        )
    return table
