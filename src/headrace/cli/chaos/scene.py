"""The moment of a fault: the request that was seen, who has to do with it, and who is hit.

Owned by the cell; the act of a fault finds its victims here and says when it struck.
"""

from dataclasses import dataclass, field

from headrace.cli.chaos.load import Load, Running
from headrace.cli.chaos.sight import Sight
from headrace.cli.chaos.states import Sighting, serving
from headrace.protocol.operator import InstanceFacts


class NotPossible(Exception):
    """Here, and why."""


@dataclass(slots=True, kw_only=True)
class Scene:
    """`target` is the request that was seen. `hit`: requests under way that have to do with the victims."""

    sighting: Sighting
    target: Running
    load: Load
    sight: Sight
    struck_at: float | None = None
    hit: list[Running] = field(default_factory=list)

    @property
    def prefiller(self) -> InstanceFacts:
        """The target's, or one where it has none yet. Raises NotPossible."""
        return self.sighting.prefiller or self._one_of("prefiller")

    @property
    def decoder(self) -> InstanceFacts:
        return self.sighting.decoder or self._one_of("decoder", "colocated")

    def _one_of(self, *roles: str) -> InstanceFacts:
        """One that works on something, if any does."""
        found = serving(self.sighting.deployment, *roles)
        if not found:
            raise NotPossible(f"no {' or '.join(roles)} is here")
        busy = {uuid for one in self.sighting.deployment.requests for uuid in (one.prefiller, one.decoder)}
        return next((one for one in found if one.uuid in busy), found[0])

    def struck(self, at: float, *victims: InstanceFacts) -> None:
        """Just now. No victims: everybody is hit."""
        if self.struck_at is not None:
            return
        self.struck_at = at
        uuids = {one.uuid for one in victims}
        ids = {one.request_id for one in self.sighting.deployment.requests if {one.prefiller, one.decoder} & uuids}
        self.hit = [
            one
            for one in self.load.under_way()
            if not victims or one is self.target or any(_is_of(request_id, one) for request_id in ids)
        ]


def _is_of(request_id: str, running: Running) -> bool:
    """A client knows its request's id from the first token on."""
    return any(request_id.startswith(known) for known in running.answer.request_ids)
