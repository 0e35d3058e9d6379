"""`headrace drain` and `headrace role` after the gateway has agreed: who is meant, and how far it is. Blocks.

Knows a deployment only as a gateway tells it, asked again and again until the instance has left, and until its
successor serves where it is to have one. A gateway that is too busy to answer once is asked again.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from headrace.cli.operator import NoAnswer, Operator
from headrace.errors import HeadraceError, InputError
from headrace.protocol.operator import Deployment, InstanceFacts

ASK_EVERY_S = 0.25
MOST_UNANSWERED = 5  # in a row, some ten seconds
LEAST_PREFIX = 4  # of a uuid


class StillLeaving(HeadraceError):
    """Not in time. It goes on all the same."""


def the_one(instance: str, instances: Sequence[InstanceFacts]) -> InstanceFacts:
    """By its name, its uuid or the beginning of that. Raises InputError naming those that are here."""
    found = [facts for facts in instances if facts.name == instance] or [
        facts for facts in instances if len(instance) >= LEAST_PREFIX and facts.uuid.startswith(instance)
    ]
    if len(found) == 1:
        return found[0]
    named = ", ".join(f"{facts.name} ({facts.uuid[:8]})" for facts in found or instances) or "nobody"
    wanted = "must be one alone, as a uuid is; by that name are here" if found else "must be one of those that are here"
    raise InputError("instance", f"{wanted}: {named}; is {instance!r}")


def wait_gone(operator: Operator, leaving: InstanceFacts, *, deadline: float, show: Callable[[str], None]) -> None:
    """Until the gateway knows it no more. Raises StillLeaving, NoAnswer."""
    while (facts := _by_uuid(deployment := _inspected(operator), leaving.uuid)) is not None:
        remaining = what_remains(deployment, facts)
        show(f"{leaving.name}: {remaining}")
        _pause(deadline, f"{leaving.name} has not left yet ({remaining}); it goes on")


def wait_serving(operator: Operator, name: str, *, deadline: float, show: Callable[[str], None]) -> InstanceFacts:
    """Until somebody of that name serves. Raises StillLeaving, NoAnswer."""
    while True:
        for facts in _inspected(operator).instances:
            if facts.name == name and facts.standing == "serving":
                return facts
        show(f"{name}: starts")
        _pause(deadline, f"{name} does not serve yet; it goes on")


def _inspected(operator: Operator) -> Deployment:
    for _ in range(MOST_UNANSWERED - 1):
        with suppress(NoAnswer):
            return operator.inspect()
    return operator.inspect()


def _pause(deadline: float, text: str) -> None:
    if time.monotonic() >= deadline:
        raise StillLeaving(text)
    time.sleep(ASK_EVERY_S)


def _by_uuid(deployment: Deployment, uuid: str) -> InstanceFacts | None:
    return next((facts for facts in deployment.instances if facts.uuid == uuid), None)


def what_remains(deployment: Deployment, facts: InstanceFacts) -> str:
    """At an instance that drains."""
    if facts.standing == "absent":
        return f"silent for {facts.silent_s:.0f} s"
    if facts.status is None:
        return "it has not said how it stands"
    own = sum(facts.uuid in (request.decoder, request.prefiller) for request in deployment.requests)
    num_here = facts.status.num_running + facts.status.num_waiting
    return f"{num_here} requests here, {own} of them of this gateway" if num_here else "no request any more"
