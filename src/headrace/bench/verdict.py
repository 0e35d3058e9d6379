"""Should one split, and how? A verdict and what it stands on. Pure; the planner answers in the same words.

It says *disaggregate* only where three things were shown, each with a number (DESIGN, "Compare and plan"):

    interference    in the colocated rival, prefills of others lengthened the gaps of running streams
    transfer        split, both latency budgets were kept at some rate: the way of the KV is fast enough
    rival           the best colocated arm missed a budget where the split one kept both, or has a lower goodput per
                    device, by an interval that excludes zero

Each is yes, no, or not known. One no is enough to stay; one that is not known is enough not to tell, and then it says
which run would decide.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from headrace.bench.comparison import Comparison
from headrace.bench.evidence import TARGETS, ArmFigures, Contest, Difference, Evidence, target_name
from headrace.bench.metrics import Interval

Kind = Literal["disaggregate", "disaggregate from", "stay colocated", "cannot tell", "depends"]

INTERFERENCE = 1.5
"""Gaps in flight (their p99) that are so many times the typical gap are more than what batches and noise do."""
FELT_SHARE = 0.1
"""Of goodput: a difference that is certainly smaller is none."""
FEWEST_RUNS = 3
"""For an interval that says anything."""
TARGET = TARGETS[0]


class Clause(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`holds` None: not known, and `decide` says which run would tell."""

    name: Literal["interference", "transfer", "rival"]
    holds: bool | None
    text: str
    decide: str = ""


class Verdict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`from_rate`: requests a second, of *disaggregate from*. `chunk_tokens`: of *stay colocated*, where it is known.
    `why`: one sentence. `decide`: of *cannot tell*, what to run."""

    kind: Kind
    workload: str
    why: str
    from_rate: float | None = None
    chunk_tokens: int | None = None
    decide: str = ""
    clauses: tuple[Clause, ...] = ()

    @property
    def words(self) -> str:
        match self.kind:
            case "disaggregate from":
                return f"disaggregate from {self.from_rate:.3g} requests/s on"
            case "stay colocated" if self.chunk_tokens is not None:
                return f"stay colocated with chunk {self.chunk_tokens}"
            case "depends":
                return "it depends on the workload"
            case _:
                return self.kind


# ---- of a comparison -------------------------------------------------------------------------------------------


def judge(comparison: Comparison, evidence: Evidence) -> tuple[Verdict, ...]:
    """One for each workload that was measured."""
    return tuple(_judge(comparison, evidence, contest) for contest in evidence.contests)


def overall(verdicts: Sequence[Verdict]) -> Verdict:
    """One for all, where they agree."""
    if not verdicts:
        return Verdict(
            kind="cannot tell", workload="all", why="no run counts", decide="run the comparison to its end: --resume"
        )
    if len(verdicts) == 1:
        return verdicts[0]
    kinds = {verdict.kind for verdict in verdicts}
    if kinds == {"disaggregate from"}:
        latest = max(verdicts, key=lambda verdict: verdict.from_rate or 0.0)
        return msgspec.structs.replace(latest, workload="all", why=f"for every workload; latest for {latest.workload}")
    if len({(verdict.kind, verdict.chunk_tokens) for verdict in verdicts}) == 1:
        return msgspec.structs.replace(verdicts[0], workload="all", why="for every workload", clauses=())
    told = "; ".join(f"{verdict.workload}: {verdict.words}" for verdict in verdicts)
    return Verdict(kind="depends", workload="all", why=told)


def _judge(comparison: Comparison, evidence: Evidence, contest: Contest) -> Verdict:
    workload = contest.workload
    rival = None if contest.colocated is None else evidence.of(contest.colocated, workload)
    split = None if contest.split is None else evidence.of(contest.split, workload)
    if rival is None or split is None:
        missing, option = ("colocated", "--chunks") if rival is None else ("split", "--prefillers")
        return Verdict(
            kind="cannot tell",
            workload=workload,
            why=f"there is no {missing} arm to compare with",
            decide=f"a comparison with a {missing} arm: {option}, or --resume where it was not finished",
        )
    chunk = comparison.arm(rival.arm).chunk_tokens
    clauses = (
        _interference(rival),
        _transfer(evidence, split),
        _rival(contest, rival, split),
    )
    return _concluded(workload, clauses, contest, chunk_tokens=chunk, rival=rival, split=split)


def _concluded(
    workload: str,
    clauses: tuple[Clause, ...],
    contest: Contest,
    *,
    chunk_tokens: int | None,
    rival: ArmFigures,
    split: ArmFigures,
) -> Verdict:
    if not _keeps_somewhere(rival) and not _keeps_somewhere(split):
        return Verdict(
            kind="cannot tell",
            workload=workload,
            why="neither arm kept both budgets for nine of ten requests at any rate",
            decide="a comparison at lower --rates, or with budgets that these devices can keep: --ttft-ms, --tpot-ms",
            clauses=clauses,
        )
    if broken := next((clause for clause in clauses if clause.holds is False), None):
        return Verdict(
            kind="stay colocated", workload=workload, why=broken.text, chunk_tokens=chunk_tokens, clauses=clauses
        )
    if unknown := next((clause for clause in clauses if clause.holds is None), None):
        return Verdict(kind="cannot tell", workload=workload, why=unknown.text, decide=unknown.decide, clauses=clauses)
    begin = _begins_at(contest, rival)
    if begin is None or begin <= min(rival.rates):
        return Verdict(kind="disaggregate", workload=workload, why=clauses[-1].text, clauses=clauses)
    why = f"below that {rival.arm} keeps both budgets; {clauses[-1].text}"
    return Verdict(kind="disaggregate from", workload=workload, why=why, from_rate=begin, clauses=clauses)


def _keeps_somewhere(figures: ArmFigures) -> bool:
    return any(kept >= TARGET for kept in figures.kept)


def _begins_at(contest: Contest, rival: ArmFigures) -> float | None:
    """The lowest rate at which the rival no longer keeps both budgets for enough requests, or is certainly behind."""
    missed = [rate for rate, kept in zip(rival.rates, rival.kept, strict=True) if kept < TARGET]
    behind = [one.rate for one in contest.differences if one.attainment.excludes_zero and one.attainment.mean > 0]
    return min((*missed, *behind), default=None)


# ---- the three -------------------------------------------------------------------------------------------------


def _interference(rival: ArmFigures) -> Clause:
    stall = rival.stall
    if stall is None or stall.typical_s <= 0 or stall.num_runs < FEWEST_RUNS:
        num = 0 if stall is None else stall.num_runs
        return Clause(
            name="interference",
            holds=None,
            text=f"interference is not known: {num} runs of {rival.arm} tell gaps, {FEWEST_RUNS} are the fewest",
            decide=f"--repetitions {FEWEST_RUNS} or more",
        )
    ratio = stall.in_flight_p99_s / stall.typical_s
    told = (
        f"in {rival.arm} a gap beside somebody's prefill is up to {_ms(stall.in_flight_p99_s)} (p99), {ratio:.1f} "
        f"times the typical {_ms(stall.typical_s)}; the longest {_ms(stall.longest_s)}"
    )
    if ratio < INTERFERENCE:
        return Clause(name="interference", holds=False, text=f"there is no interference to be spared: {told}")
    return Clause(name="interference", holds=True, text=told)


def _transfer(evidence: Evidence, split: ArmFigures) -> Clause:
    best = max(range(len(split.rates)), key=lambda nth: (split.kept[nth], split.rates[nth]))
    slo = evidence.slo
    told = (
        f"{split.arm} keeps both budgets for {split.kept[best]:.0%} of the requests at {split.rates[best]:.3g}/s: "
        f"first tokens {_ms(split.ttft_p90_s[best])} of {_ms(slo.ttft_s)}, further ones "
        f"{_ms(split.tpot_p90_s[best])} of {_ms(slo.tpot_s)} (p90)"
    )
    if _keeps_somewhere(split):
        return Clause(name="transfer", holds=True, text=told)
    return Clause(
        name="transfer", holds=False, text=f"split, the budgets are not kept: {told} at the best of its rates"
    )


def _rival(contest: Contest, rival: ArmFigures, split: ArmFigures) -> Clause:
    """By goodput per device, and by attainment at each rate."""
    name = target_name(TARGET)
    gain = contest.goodput_per_device.get(name)
    better = [one for one in contest.differences if _is_better(one)]
    if better:
        one = max(better, key=lambda difference: difference.attainment.mean)
        told = f"at {one.rate:.3g} requests/s {split.arm} keeps {_points(one.attainment)} more than {rival.arm}"
        return Clause(name="rival", holds=True, text=f"{told}{_gain_text(gain)}")
    own = rival.goodput[name].rate
    if gain is not None and gain.low is not None and gain.low > 0:
        return Clause(name="rival", holds=True, text=f"{rival.arm} has a lower goodput{_gain_text(gain)}")
    num = max((one.num_pairs for one in contest.differences), default=0)
    if rival.goodput[name].is_bound and split.goodput[name].is_bound and num >= FEWEST_RUNS:
        told = (
            f"up to {max(rival.rates):.3g} requests/s, the most that was asked, {rival.arm} keeps both budgets itself"
        )
        return Clause(name="rival", holds=False, text=told)
    if gain is not None and gain.high is not None and gain.high <= FELT_SHARE * rival.goodput_per_device[name].mean:
        told = f"splitting gains nothing over {rival.arm}"
        return Clause(name="rival", holds=False, text=f"{told}{_gain_text(gain)}")
    return Clause(
        name="rival",
        holds=None,
        text=f"{num} paired repetitions do not tell the arms apart{_gain_text(gain)}",
        decide=f"--repetitions {max(2 * num, FEWEST_RUNS + 2)}, with {_rates_text(own, rival)}",
    )


def _rates_text(own: float, rival: ArmFigures) -> str:
    return f"--rates about {own:.3g}" if own else f"--rates below {min(rival.rates):.3g}"


def _is_better(one: Difference) -> bool:
    return one.num_pairs >= FEWEST_RUNS and one.attainment.low is not None and one.attainment.low > 0


def _ms(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds * 1e3:.0f} ms"


def _points(share: Interval) -> str:
    bounds = "" if share.low is None or share.high is None else f" ({100 * share.low:.0f} to {100 * share.high:.0f})"
    return f"{100 * share.mean:.0f} points{bounds}"


def _gain_text(gain: Interval | None) -> str:
    if gain is None:
        return ""
    bounds = "" if gain.low is None or gain.high is None else f" ({gain.low:+.2f} to {gain.high:+.2f})"
    return f"; goodput {gain.mean:+.2f} requests/s a device{bounds}"
