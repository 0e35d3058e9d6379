"""What an operator is told, and what is done for it: the deployment as this gateway knows it, and who is to leave it.

Owns nothing; runs on the gateway's loop. An instance that is to leave is told so, and tells all gateways itself. A
request's stage is read off its attempt, which hears all that the gateway hears of it.
"""

import os
from itertools import count, islice

from headrace.gateway.dispatch.attempt import Attempt, State
from headrace.gateway.dispatch.exchange import Exchange
from headrace.gateway.dispatch.instances import Instance
from headrace.gateway.options import GatewayOptions
from headrace.protocol.control import CONTROL_VERSION, Drain, Role, Successor
from headrace.protocol.messages import MOST_REMAINING_S, clipped
from headrace.protocol.operator import (
    MOST_REQUESTS_TOLD,
    Deployment,
    Dismiss,
    GatewayFacts,
    Inspect,
    InstanceFacts,
    Leaves,
    OperatorAnswer,
    OperatorMessage,
    Refused,
    RequestFacts,
    Stage,
    Standing,
)


class OperatorDesk:
    def __init__(self, options: GatewayOptions, exchange: Exchange) -> None:
        self._options = options
        self._exchange = exchange

    def answer(self, message: OperatorMessage, now: float) -> OperatorAnswer:
        match message:
            case Inspect(version=version):
                if version != CONTROL_VERSION:
                    return self._refused("version", f"must be {CONTROL_VERSION} as the gateway's, is {version}")
                return self._deployment(now)
            case Dismiss():
                return self._dismiss(message)

    def _refused(self, field: str, text: str) -> Refused:
        return Refused(sender=self._exchange.uuid, field=field, text=clipped(text))

    def _dismiss(self, message: Dismiss) -> Leaves | Refused:
        instance = self._exchange.instances.get(message.instance)
        if instance is None:
            return self._refused("instance", f"must be one that is here, {message.instance} is not")
        if instance.is_draining and message.role is None:
            return Leaves(sender=self._exchange.uuid, instance=instance.uuid, successor=None)  # it was told already
        if refusal := self._why_not(instance, message):
            return self._refused(*refusal)
        successor = None
        if message.role is not None:
            name = self._free_name(message.role)
            successor = Successor(role=message.role, name=name, tpot_s=message.tpot_s, max_stall_s=message.max_stall_s)
        self._exchange.tell(instance.uuid, Drain(sender=self._exchange.uuid, successor=successor))
        name_after = None if successor is None else successor.name
        return Leaves(sender=self._exchange.uuid, instance=instance.uuid, successor=name_after)

    def _why_not(self, instance: Instance, message: Dismiss) -> tuple[str, str] | None:
        """-> field and reason."""
        told = instance.announce
        if message.role is not None:
            if told.role == message.role:
                return "role", f"must be another one, {instance} is a {message.role} already"
            if told.role == "colocated":
                return (
                    "instance",
                    f"must be a prefiller or a decoder, {instance} has no fabric to send or receive KV by",
                )
            if told.dp > 1:
                return "instance", f"must be one group of ranks as a prefiller is, {instance} has {told.dp}"
            if instance.is_draining:
                return "instance", f"must not be leaving, {instance} is"
        others = [other for other in self._exchange.instances.open_decoders() if other.uuid != instance.uuid]
        if instance.decodes and not others and not message.is_forced:
            return "force", f"must be given for {instance}: without it no request can be served"
        return None

    def _free_name(self, role: Role) -> str:
        """The first of role-0, role-1, .. that nobody has whom this gateway knows, present or absent."""
        taken = {instance.announce.name for instance in self._exchange.instances.known()}
        return next(name for number in count() if (name := f"{role}-{number}") not in taken)

    def _deployment(self, now: float) -> Deployment:
        attempts = self._exchange.attempts()
        return Deployment(
            sender=self._exchange.uuid,
            gateway=GatewayFacts(
                uuid=self._exchange.uuid,
                name=self._options.name,
                model=self._options.model,
                url=self._options.url,
                pid=os.getpid(),
            ),
            instances=tuple(_instance_facts(instance, now) for instance in self._exchange.instances.known()),
            requests=tuple(_request_facts(attempt) for attempt in islice(attempts, MOST_REQUESTS_TOLD)),
            num_requests=len(attempts),
        )


def _instance_facts(instance: Instance, now: float) -> InstanceFacts:
    told = instance.announce
    return InstanceFacts(
        uuid=instance.uuid,
        name=told.name,
        role=told.role,
        standing=standing_of(instance),
        refusal=clipped(instance.refusal or ""),
        silent_s=min(MOST_REMAINING_S, max(0.0, now - instance.heard_at)),
        host=told.host,
        pid=told.pid,
        started=told.started,
        fabric_address=told.fabric_address,
        limits=told.limits,
        tp=told.tp,
        dp=told.dp,
        status=instance.status,
    )


def standing_of(instance: Instance) -> Standing:
    if instance.is_alive:
        return "draining" if instance.is_draining else "serving"
    return "absent" if instance.refusal is None else "refused"


def _request_facts(attempt: Attempt) -> RequestFacts:
    errand = attempt.errand
    num_prompt_tokens = len(errand.generation.token_ids)
    return RequestFacts(
        request_id=errand.request_id,
        tier=errand.generation.tier,
        stage=stage_of(attempt),
        decoder=attempt.decoder,
        prefiller=attempt.prefiller,
        num_prompt_tokens=num_prompt_tokens,
        num_tokens=len(errand.token_ids) - num_prompt_tokens + attempt.num_tokens,
    )


def stage_of(attempt: Attempt) -> Stage:
    """Of one that is over and not placed anew yet: waiting."""
    if attempt.state is State.OFFERED:
        return "offered"
    if attempt.state is not State.RUNNING:
        return "waiting"
    if attempt.num_tokens:
        return "decoding"
    is_computed = attempt.prefilled is not None and attempt.prefilled.sender == attempt.prefiller
    return "transferring" if is_computed else "prefilling"
