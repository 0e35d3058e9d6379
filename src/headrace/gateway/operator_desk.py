"""What an operator is told: the deployment as this gateway knows it. Owns nothing; runs on the gateway's loop.

A request's stage is read off its attempt, which hears all that the gateway hears of it.
"""

import os
from itertools import islice

from headrace.gateway.attempt import Attempt, State
from headrace.gateway.exchange import Exchange
from headrace.gateway.instances import Instance
from headrace.gateway.options import GatewayOptions
from headrace.protocol.control import CONTROL_VERSION
from headrace.protocol.messages import MOST_REMAINING_S, clipped
from headrace.protocol.operator import (
    MOST_REQUESTS_TOLD,
    Deployment,
    GatewayFacts,
    Inspect,
    InstanceFacts,
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

    def _refused(self, field: str, text: str) -> Refused:
        return Refused(sender=self._exchange.uuid, field=field, text=clipped(text))

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
        status=instance.status,
    )


def standing_of(instance: Instance) -> Standing:
    if instance.is_alive:
        return "serving"
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
