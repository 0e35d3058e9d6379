"""The states of a request that a fault can hit, and a request that is seen in one. Pure: deployments in, sightings out.

Nobody outside sees a request's every step. What its gateway tells of it does, and whether bytes land in its decoder's
memory, which whoever makes a search looks up.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from headrace.protocol.operator import Deployment, InstanceFacts, RequestFacts

State = Literal["waiting", "prefilling", "transferring", "starting", "decoding"]

STATES: Final[Mapping[State, str]] = {
    "waiting": "holds nothing yet: no prefiller has a lease for it, or no decoder has room",
    "prefilling": "just accepted by a decoder; a prefiller computes it",
    "transferring": "some of it has landed at the decoder, the rest is still computed",
    "starting": "all of it is computed; the last bytes land, or it waits for its first step",
    "decoding": "tokens come",
}

WAITS_S = 0.05
"""Every request waits for a moment; one that was seen to for so long waits for something."""

DECODING_TOKENS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """A request in the wanted state, when, and the instances that have to do with it."""

    at: float
    request: RequestFacts
    deployment: Deployment

    @property
    def prefiller(self) -> InstanceFacts | None:
        return instance_of(self.deployment, self.request.prefiller)

    @property
    def decoder(self) -> InstanceFacts | None:
        return instance_of(self.deployment, self.request.decoder)


def instance_of(deployment: Deployment, uuid: str | None) -> InstanceFacts | None:
    return next((one for one in deployment.instances if one.uuid == uuid), None)


def serving(deployment: Deployment, *roles: str) -> list[InstanceFacts]:
    return [one for one in deployment.instances if one.standing == "serving" and one.role in roles]


class Search:
    """For the first request with a prompt of one of `lengths` that is in that state; what was seen of them so far.
    `is_vain`: they were there, and are no more. `has_travelled`: one of them was given to a prefiller. `has_landed`:
    whether a prompt's pages have landed at that decoder since it was first asked about it."""

    def __init__(self, state: State, lengths: Collection[int], has_landed: Callable[[InstanceFacts], bool]) -> None:
        self._state = state
        self._lengths = frozenset(lengths)
        self._waits_since: dict[str, float] = {}
        self._has_landed = has_landed
        self._were_there = False
        self.is_vain = False
        self.has_travelled = False

    def found_in(self, deployment: Deployment, now: float) -> Sighting | None:
        there = [one for one in deployment.requests if one.num_prompt_tokens in self._lengths]
        for request in there:
            if self._is_in_state(request, deployment, now):
                return Sighting(at=now, request=request, deployment=deployment)
        self.is_vain = self._were_there and not there
        self._were_there = self._were_there or bool(there)
        self.has_travelled = self.has_travelled or any(one.prefiller is not None for one in there)
        return None

    def _is_in_state(self, request: RequestFacts, deployment: Deployment, now: float) -> bool:
        """With a prefiller where that says something: one that the decoder computes by itself is in no transfer."""
        if self._state == "waiting":
            since = self._waits_since.setdefault(request.request_id, now)
            return request.stage == "waiting" and now - since >= WAITS_S
        if self._state == "decoding":
            return request.stage == "decoding" and request.num_tokens >= DECODING_TOKENS
        decoder = instance_of(deployment, request.decoder)
        if request.prefiller is None or decoder is None:
            return False
        if self._state == "starting":
            return request.stage == "transferring"
        return request.stage == "prefilling" and (self._state == "prefilling" or self._has_landed(decoder))
