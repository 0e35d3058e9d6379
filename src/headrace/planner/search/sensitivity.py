"""What remains of a deployment when something is not as was thought. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from headrace.bench.workload import ArrivalList
from headrace.planner.search.candidate import Candidate
from headrace.planner.search.wanted import Held, Wanted, held

RATES = (0.7, 1.3)
LINK = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    held: Held


def cases(candidate: Candidate, wanted: Wanted) -> Iterator[Case]:
    """As was thought first; then one change each."""
    slo, lists, rate = wanted.slo, wanted.lists, wanted.rate
    yield Case(name="as planned", held=held(candidate, lists(rate), slo))
    for factor in RATES:
        yield Case(name=f"rate {factor - 1:+.0%}", held=held(candidate, lists(factor * rate), slo))
    if candidate.is_split:
        yield Case(name="link halved", held=held(candidate.with_link(LINK), lists(rate), slo))
    yield Case(name="prompts doubled", held=held(candidate, prompts_doubled(lists(rate)), slo))
    for pool in candidate.pools:
        if pool.count > 1:
            name = f"one {pool.kind.role if candidate.is_split else 'instance'} gone"
            yield Case(name=name, held=held(candidate, lists(rate), slo, without=pool.kind.role))


def prompts_doubled(arrivals: ArrivalList) -> ArrivalList:
    """What no block names is as much longer as all of it was."""
    doubled = [msgspec.structs.replace(one, prompt_tokens=2 * one.prompt_tokens) for one in arrivals.arrivals]
    return msgspec.structs.replace(arrivals, arrivals=tuple(doubled), notes=(*arrivals.notes, "prompts doubled"))
