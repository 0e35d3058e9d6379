"""Ways out of prefillers and into decoders, and when what is sent there has arrived. Owns the traffic of each.

A way takes what comes first first, and is never idle while something is there. The bytes of a step of L layers come in
L equal parts, each when its layer is computed. With `free_at`, when all that came before is through, the last part is
through (Lindley's recursion, whose maximum lies at its first or its last part):

    max(begun + step / L, free_at) + all parts          the way is what is slow: it was busy from the first layer on
    begun + step + one part                             the step is: each layer is through before the next is there
"""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.planner.scenario import LinkModel


@dataclass(slots=True)
class Way:
    """One instance's, in one direction. `busy_s`: that bytes kept it."""

    free_at: float = 0.0
    num_bytes: int = 0
    busy_s: float = 0.0

    def through_at(self, begun: float, took_s: float, num_parts: int, needs_s: float) -> float:
        """When the last of `num_parts` is, which come evenly in the `took_s` from `begun` on; needs them in order."""
        busy = max(begun + took_s / num_parts, self.free_at) + needs_s
        self.free_at = max(busy, begun + took_s + needs_s / num_parts)
        self.busy_s += needs_s
        return self.free_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """To one decoder, in one step of a prefiller."""

    way_in: Way
    link: LinkModel
    num_bytes: int
    num_messages: int


def send(way_out: Way, sent: Sequence[Sent], begun: float, took_s: float, num_layers: int) -> list[float]:
    """What a step of `num_layers`, or (0 s) no step at all, gives away. -> when each has arrived. They share the way
    out layer by layer, so its last layer is the last of all of them."""
    num_parts = num_layers if took_s else 1
    needs_s = sum(one.link.seconds(one.num_bytes, one.num_messages) for one in sent)
    out_at = way_out.through_at(begun, took_s, num_parts, needs_s)
    arrived = []
    for one in sent:
        way_out.num_bytes += one.num_bytes
        one.way_in.num_bytes += one.num_bytes
        in_at = one.way_in.through_at(begun, took_s, num_parts, one.num_bytes / one.link.bytes_s)
        arrived.append(max(out_at, in_at) + one.link.latency_s)
    return arrived
