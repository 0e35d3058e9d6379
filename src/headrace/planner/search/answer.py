"""The best deployment of each architecture, and what is said of them: a verdict in the words of `bench.verdict`. Pure.

Costs of steps are never quite right. Where colocated instances that are as much faster as the model's error would do
with what the split ones cost, nobody can tell from here.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from headrace.bench.verdict import Clause, Verdict
from headrace.engine.cost import StepSize
from headrace.planner.scenario import StepModel
from headrace.planner.search.candidate import Candidate, Objective
from headrace.planner.search.least import Found, fewest, least
from headrace.planner.search.site import Lengths
from headrace.planner.search.wanted import Note, Wanted

MOST_SHAPES = 12
"""Of an architecture, those that could cost least by the closed form."""
LOWER_RATES = (0.25, 0.5)
"""Of the rate, at which it is asked whether splitting pays there too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faster:
    """A StepModel: another one's steps in a share of their time."""

    steps: StepModel
    factor: float

    def step_s(self, size: StepSize) -> float:
        return self.steps.step_s(size) / self.factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """`error`: of step times, relative. `workload`: its name, for the verdict."""

    colocated: Sequence[Candidate]
    split: Sequence[Candidate]
    wanted: Wanted
    lengths: Lengths
    objective: Objective
    error: float
    workload: str
    with_one_less: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """`chunks`: the least that does of each chunk size, as the colocated arms of a comparison."""

    colocated: Found | None
    split: Found | None
    chunks: tuple[tuple[int, Found | None], ...]
    verdict: Verdict

    @property
    def best(self) -> Found | None:
        """What the verdict is for; where it cannot tell, colocated if that does."""
        is_split = self.verdict.kind in {"disaggregate", "disaggregate from"}
        return self.split if is_split else self.colocated or self.split


def answered(question: Question, *, say: Note = lambda text: None) -> Answer:
    """What `say` is told: which candidate is simulated."""
    chunks = _by_chunk(question, say)
    colocated = _cheapest((found for _, found in chunks), question.objective)
    split = best_of(question.split, question, say=say)
    return Answer(
        colocated=colocated,
        split=split,
        chunks=chunks,
        verdict=_verdict(question, colocated, split, say),
    )


def best_of(
    shapes: Sequence[Candidate], question: Question, *, rate: float | None = None, say: Note = lambda text: None
) -> Found | None:
    """Those that could be cheapest first: what costs more than the best so far, even by the closed form, is left."""
    wanted = question.wanted if rate is None else replace(question.wanted, rate=rate)
    best: Found | None = None
    for shape in _promising(shapes, wanted, question):
        below = None if best is None else _amount(best, question)
        best = _least(shape, wanted, question, below=below, say=say) or best
    return best


def _least(shape: Candidate, wanted: Wanted, question: Question, *, below: float | None, say: Note) -> Found | None:
    return least(
        shape,
        wanted,
        question.lengths,
        objective=question.objective,
        below=below,
        with_one_less=question.with_one_less,
        note=say,
    )


def _promising(shapes: Sequence[Candidate], wanted: Wanted, question: Question) -> list[Candidate]:
    def bound(shape: Candidate) -> float:
        return shape.of_counts(fewest(shape, wanted.rate, question.lengths)).amount(question.objective)

    return sorted(shapes, key=bound)[:MOST_SHAPES]


def _by_chunk(question: Question, say: Note) -> tuple[tuple[int, Found | None], ...]:
    sizes = sorted({shape.pools[0].kind.chunk_tokens for shape in question.colocated})
    found = []
    for size in sizes:
        shapes = [shape for shape in question.colocated if shape.pools[0].kind.chunk_tokens == size]
        found.append((size, best_of(shapes, question, say=say)))
    return tuple(found)


def _cheapest(found: Iterable[Found | None], objective: Objective) -> Found | None:
    """Of those that cost the same the one that keeps its budgets best."""
    known = [one for one in found if one is not None]
    return min(known, key=lambda one: (one.candidate.amount(objective), -one.held.attainment), default=None)


# ---- the verdict -----------------------------------------------------------------------------------------------


def _verdict(question: Question, colocated: Found | None, split: Found | None, say: Note) -> Verdict:
    name = question.workload
    clauses = tuple(_clauses(question, colocated, split))
    if colocated is None and split is None:
        return Verdict(
            kind="cannot tell",
            workload=name,
            why="nothing that was tried holds both budgets",
            decide="a plan with other devices, or with budgets that they can keep: --ttft-ms, --tpot-ms",
            clauses=clauses,
        )
    if split is None or (colocated is not None and _amount(colocated, question) <= _amount(split, question)):
        assert colocated is not None
        why = "split, nothing holds" if split is None else clauses[-1].text
        chunk = colocated.candidate.pools[0].kind.chunk_tokens
        return Verdict(kind="stay colocated", workload=name, why=why, chunk_tokens=chunk, clauses=clauses)
    if _rival_may_do(question, _amount(split, question), say):
        text = (
            f"colocated instances whose steps are {question.error:.0%} faster, which is how wrong step times may be, "
            f"would do with what the split ones cost"
        )
        return Verdict(
            kind="cannot tell", workload=name, why=text, decide="headrace compare on two such devices", clauses=clauses
        )
    begin = _begins_at(question, say)
    if begin is None:
        return Verdict(kind="disaggregate", workload=name, why=clauses[-1].text, clauses=clauses)
    why = f"below that colocated instances cost no more; {clauses[-1].text}"
    return Verdict(kind="disaggregate from", workload=name, why=why, from_rate=begin, clauses=clauses)


def _amount(found: Found, question: Question) -> float:
    return found.candidate.amount(question.objective)


def _rival_may_do(question: Question, amount: float, say: Note) -> bool:
    """With the largest error that is to be expected."""
    faster = [quickened(shape, 1 + question.error) for shape in question.colocated]
    limit = amount * (1 + 1e-9)
    wanted = question.wanted
    return any(_least(shape, wanted, question, below=limit, say=say) for shape in _promising(faster, wanted, question))


def quickened(shape: Candidate, factor: float) -> Candidate:
    pools = tuple(
        replace(pool, kind=replace(pool.kind, steps=Faster(steps=pool.kind.steps, factor=factor)))
        for pool in shape.pools
    )
    return replace(shape, pools=pools)


def _begins_at(question: Question, say: Note) -> float | None:
    """The lowest rate that was asked at which split instances cost less; None: at all of them."""
    rates = [share * question.wanted.rate for share in LOWER_RATES]
    cheaper = []
    for rate in rates:
        colocated = best_of(question.colocated, question, rate=rate, say=say)
        split = best_of(question.split, question, rate=rate, say=say)
        is_cheaper = split is not None and (
            colocated is None or _amount(split, question) < _amount(colocated, question)
        )
        cheaper.append(is_cheaper)
    if all(cheaper):
        return None
    behind = max(nth for nth, one in enumerate(cheaper) if not one)
    return [*rates, question.wanted.rate][behind + 1]


def _clauses(question: Question, colocated: Found | None, split: Found | None) -> Iterable[Clause]:
    slo = question.wanted.slo
    if colocated is not None and colocated.held.stall_s is not None and colocated.held.tpot_p50_s:
        ratio = colocated.held.stall_s / colocated.held.tpot_p50_s
        yield Clause(
            name="interference",
            holds=ratio >= 2,
            text=f"colocated, the longest gap of a stream is {_ms(colocated.held.stall_s)}, {ratio:.1f} times the "
            f"typical {_ms(colocated.held.tpot_p50_s)}",
        )
    if split is not None:
        yield Clause(
            name="transfer",
            holds=True,
            text=f"split, first tokens take {_ms(split.held.ttft_p90_s)} of {_ms(slo.ttft_s)}, further ones "
            f"{_ms(split.held.tpot_p90_s)} of {_ms(slo.tpot_s)} (p90)",
        )
    told = " against ".join(
        f"{told_amount(found, question.objective)} {kind}" if found else f"nothing {kind}"
        for found, kind in ((split, "split"), (colocated, "colocated"))
    )
    is_less = split is not None and (colocated is None or _amount(split, question) < _amount(colocated, question))
    yield Clause(name="rival", holds=is_less, text=f"{told} at {question.wanted.rate:.3g} requests/s")


def told_amount(found: Found, objective: Objective) -> str:
    amount = found.candidate.amount(objective)
    units = {"devices": f"{amount:.0f} devices", "cost": f"{amount:.2f} an hour", "power": f"{amount / 1e3:.2f} kW"}
    return units[objective]


def _ms(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds * 1e3:.0f} ms"
