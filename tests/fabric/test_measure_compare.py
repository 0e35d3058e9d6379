"""Turns of the engine and its limits, with scripted ones: who runs when, over which pages, and what comes out."""

from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from headrace.fabric.limits.placement import Placement
from headrace.fabric.limits.records import LinkRun, RoundTrips
from headrace.fabric.measure.compare import compare_pages, compare_rounds, compare_submits
from headrace.fabric.measure.link import EngineLink
from headrace.fabric.measure.plan import ASLEEP_PAUSE_S, Plan
from headrace.fabric.measure.run import num_steps

PLAN = Plan(page_sizes=(4096,), num_bytes=2 << 20, num_pairs=3, num_rounds=50)


@dataclass
class Scripted:
    """Carries at a rate; the story is shared by all who take turns."""

    name: str
    story: list[tuple[str, Any]]
    seconds: float = 1.0
    is_whole: bool = True
    p50_ns: int = 1000
    ticks: list[str] = field(default_factory=list)

    def run(self, placement: Placement) -> LinkRun:
        self.story.append((self.name, placement.src_offsets[0]))
        return LinkRun(
            num_bytes=placement.num_bytes, seconds=self.seconds, sender_cpu_s=self.seconds, receiver_cpu_s=0.5
        )

    def carries_whole(self, placement: Placement) -> bool:
        self.story.append(("whole", placement.src_offsets[0]))
        return self.is_whole

    def rounds(self, by: str, num_rounds: int, pause_s: float) -> RoundTrips:
        return self.round_trips(num_rounds, pause_s=pause_s)

    def round_trips(self, num_rounds: int, *, pause_s: float = 0.0) -> RoundTrips:
        self.story.append((self.name, (num_rounds, pause_s)))
        return RoundTrips(num_rounds=num_rounds, p50_ns=self.p50_ns, p99_ns=2 * self.p50_ns)

    def submits(self, placement: Placement, num_rounds: int) -> tuple[RoundTrips, RoundTrips]:
        assert placement.num_pages == 1000
        return self.round_trips(num_rounds), self.round_trips(num_rounds)


def engine(story: list[tuple[str, Any]], **how: Any) -> EngineLink:
    return cast("EngineLink", Scripted("engine", story, **how))


def test_pairs_are_of_the_same_pages_one_after_the_other() -> None:
    story: list[tuple[str, Any]] = []
    ticks: list[str] = []
    limits = [Scripted("bare", story, seconds=0.5), Scripted("socket", story, seconds=2.0)]
    rates = compare_pages(engine(story), limits, PLAN, 4096, ticks.append)
    assert story[0][0] == "whole"
    measured = story[-3 * PLAN.num_pairs :]
    assert [name for name, _ in measured] == ["engine", "bare", "socket"] * PLAN.num_pairs
    firsts = [measured[3 * pair : 3 * pair + 3] for pair in range(PLAN.num_pairs)]
    assert all(len({place for _, place in turn}) == 1 for turn in firsts)
    assert len({turn[0][1] for turn in firsts}) == PLAN.num_pairs  # each pair meets other pages than the last
    warmed = {place for name, place in story[1 : -3 * PLAN.num_pairs] if name == "engine"}
    assert {turn[0][1] for turn in firsts} <= warmed  # of which every one was touched before
    assert len(ticks) == 1 + PLAN.num_pairs
    assert rates.bytes_per_s.median == 2 << 20 and rates.num_pairs == PLAN.num_pairs
    assert [(limit.name, limit.share.median) for limit in rates.limits] == [("bare", 0.5), ("socket", 2.0)]
    assert rates.cpu_s_per_gb == pytest.approx(1.5e9 / (2 << 20))


def test_wrong_bytes_are_told_beside_the_rate() -> None:
    story: list[tuple[str, Any]] = []
    limits = [Scripted("bare", story)]
    assert not compare_pages(engine(story, is_whole=False), limits, PLAN, 4096, lambda what: None).is_whole
    assert compare_pages(engine(story), limits, PLAN, 4096, lambda what: None).is_whole


def test_times_stand_beside_the_limit_that_sleeps_as_they_do() -> None:
    story: list[tuple[str, Any]] = []
    limits = {"owner": Scripted("spin", story, p50_ns=500), "owner_asleep": Scripted("futex", story, p50_ns=2000)}
    awake = compare_rounds("owner", engine(story), limits, PLAN, lambda what: None)  # type: ignore[arg-type]
    assert story == [("engine", (50, 0.0)), ("spin", (50, 0.0))] * 3
    story.clear()
    asleep = compare_rounds("owner_asleep", engine(story), limits, PLAN, lambda what: None)  # type: ignore[arg-type]
    assert story == [("engine", (10, ASLEEP_PAUSE_S)), ("futex", (10, ASLEEP_PAUSE_S))] * 3
    assert awake.limit is not None and awake.limit.share.median == 0.5
    assert asleep.limit is not None and asleep.limit.share.median == 2.0
    assert asleep.p99_ns.median == 2000 and asleep.pause_s == ASLEEP_PAUSE_S


def test_a_time_without_a_limit_stands_alone() -> None:
    assert compare_rounds("message", engine([]), {}, PLAN, lambda what: None).limit is None
    submit, coroutine = compare_submits(engine([]), {}, PLAN, lambda what: None)
    assert (submit.kind, coroutine.kind) == ("submit", "coroutine") and coroutine.limit is None


def test_a_step_is_told_for_every_run_that_counts() -> None:
    assert num_steps(Plan(page_sizes=(64, 128), num_bytes=4096, num_pairs=3, num_rounds=0, rest_s=0.0)) == 2 * 4
    assert num_steps(Plan(page_sizes=(64,), num_bytes=4096, num_pairs=30, num_rounds=1)) == 31 + 5 * 7 + 1
