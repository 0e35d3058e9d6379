"""Of one shape the least numbers of instances that hold what is wanted. Pure.

A closed form says where to begin, and how few can never do; simulations say what holds. More instances hold what fewer
do, so from the first numbers that hold each pool is made smaller as long as that holds.
"""

from dataclasses import dataclass, field
from math import ceil

from headrace.engine.cost import StepSize, chunk_sizes
from headrace.planner.search.candidate import Candidate, Kind, Objective
from headrace.planner.search.site import Lengths
from headrace.planner.search.wanted import Held, Note, Wanted, held

MOST_TRIALS = 24
BEGIN_BUSY = 0.75
"""Of an instance's time, at the numbers that are tried first."""
MOST_INSTANCES = 256


@dataclass(slots=True, kw_only=True)
class Trials:
    """What was simulated of one shape, by its numbers: as planned, and `worst`, which with one less is another.
    `able`: those that hold in both."""

    shape: Candidate
    wanted: Wanted
    with_one_less: bool
    note: Note
    found: dict[tuple[int, ...], Held] = field(default_factory=dict)
    worst: dict[tuple[int, ...], Held] = field(default_factory=dict)
    able: set[tuple[int, ...]] = field(default_factory=set)

    def holds(self, counts: tuple[int, ...]) -> bool:
        if self.with_one_less and min(counts) < 2:
            return False
        if counts not in self.found:
            self._simulate(counts)
            if self.worst[counts].attainment >= self.wanted.target:
                self.able.add(counts)
        return counts in self.able

    def _simulate(self, counts: tuple[int, ...]) -> None:
        candidate, wanted = self.shape.of_counts(counts), self.wanted
        self.note(f"{candidate}")
        arrivals = wanted.lists(wanted.rate)
        whole = held(candidate, arrivals, wanted.slo)
        each = [whole]
        if self.with_one_less and whole.attainment >= wanted.target:
            each += [held(candidate, arrivals, wanted.slo, without=pool.kind.role) for pool in candidate.pools]
        self.found[counts] = whole
        self.worst[counts] = min(each, key=lambda one: one.attainment)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    candidate: Candidate
    held: Held


def least(
    shape: Candidate,
    wanted: Wanted,
    lengths: Lengths,
    *,
    objective: Objective,
    below: float | None = None,
    with_one_less: bool = False,
    note: Note = lambda text: None,
) -> Found | None:
    """None: no numbers hold it, or none that cost less than `below`. `with_one_less`: one instance of each pool may be
    gone, and the others still hold it."""
    floor = fewest(shape, wanted.rate, lengths)
    if below is not None and shape.of_counts(floor).amount(objective) >= below:
        return None
    trials = Trials(shape=shape, wanted=wanted, with_one_less=with_one_less, note=note)
    counts = tuple(max(1 + with_one_less, ceil(busy / BEGIN_BUSY)) for busy in _busy(shape, wanted.rate, lengths))
    while not trials.holds(counts):
        counts = _more(counts, trials)
        is_dear = below is not None and shape.of_counts(counts).amount(objective) >= below
        if len(trials.found) >= MOST_TRIALS or max(counts) > MOST_INSTANCES or is_dear:
            return None
    is_smaller = True
    while is_smaller and len(trials.found) < MOST_TRIALS:
        is_smaller = False
        for place in sorted(range(len(counts)), key=lambda nth: -shape.pools[nth].kind.num_devices):
            fewer = tuple(number - (nth == place) for nth, number in enumerate(counts))
            if fewer[place] >= floor[place] and trials.holds(fewer):
                counts, is_smaller = fewer, True
    candidate = shape.of_counts(counts)
    if below is not None and candidate.amount(objective) >= below:
        return None
    return Found(candidate=candidate, held=trials.found[counts])


def _more(counts: tuple[int, ...], trials: Trials) -> tuple[int, ...]:
    """Of whoever is short: prefillers where first tokens are late, decoders where the others are."""
    known = trials.worst.get(counts)
    if len(counts) == 1 or known is None:
        return tuple(number + 1 for number in counts)
    lacks_prefillers = known.late_ttft > known.late_tpot
    if lacks_prefillers and known.busy.get("decoder", 0.0) > known.busy.get("prefiller", 0.0) > 0:
        return (counts[0], counts[1] + 1)  # they wait for room at a decoder
    return (counts[0] + 1, counts[1]) if lacks_prefillers else (counts[0], counts[1] + 1)


# ---- in closed form --------------------------------------------------------------------------------------------


def fewest(shape: Candidate, rate: float, lengths: Lengths) -> tuple[int, ...]:
    """Fewer cannot even keep up."""
    return tuple(max(1, ceil(busy)) for busy in _busy(shape, rate, lengths))


def _busy(shape: Candidate, rate: float, lengths: Lengths) -> list[float]:
    """Instances that are busy all the time, in each pool, if nothing ever waited."""
    if not shape.is_split:
        kind = shape.pools[0].kind
        return [rate * (prefill_s(kind, lengths) + decode_s(kind, lengths)) / kind.sharding.dp]
    prefiller, decoder = (pool.kind for pool in shape.pools)
    return [
        rate * prefill_s(prefiller, lengths) / prefiller.sharding.dp,
        rate * decode_s(decoder, lengths) / decoder.sharding.dp,
    ]


def prefill_s(kind: Kind, lengths: Lengths) -> float:
    """Of a group, with a prompt of usual length in chunks that are full."""
    prompt, chunk = max(1, int(lengths.mean_prompt)), kind.chunk_tokens
    if prompt >= chunk:
        return sum(kind.steps.step_s(size) for size in chunk_sizes(prompt, chunk))
    num = chunk / prompt
    together = StepSize(chunk_tokens=chunk, keys=chunk, pairs=int(num * prompt * (prompt + 1) / 2))
    return kind.steps.step_s(together) / num


def decode_s(kind: Kind, lengths: Lengths) -> float:
    """Of a group, with one request, in steps that are as full as they may be."""
    rows = max(1, min(kind.max_running, int(kind.num_pages * kind.page_size / max(1.0, lengths.mean_keys))))
    size = StepSize(rows=rows, keys=int(rows * lengths.mean_keys))
    return lengths.mean_output * kind.steps.step_s(size) / rows
