"""What a comparison asks: other prompts with each rate and repetition, so that nobody finds what was asked before."""

from itertools import combinations
from pathlib import Path

import pytest

from headrace.bench.prompts import prompt_ids
from headrace.bench.workload import ArrivalList, Fit
from headrace.cli.compare.lists import Lists
from headrace.errors import InputError

FIT = Fit(max_prompt_tokens=400, max_output_tokens=50, max_model_len=1000)
TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:{nth // 60:02}:{nth % 60:02}.0000000,{100 + nth},{1 + nth}\n" for nth in range(30)
)


def lists_of(tmp_path: Path, *words: str, arrivals: str | None = None) -> Lists:
    (tmp_path / "trace.csv").write_text(TRACE)
    named = [str(tmp_path / "trace.csv") if word == "trace" else word for word in words]
    return Lists(named, arrivals, begin_s=0.0, fit=FIT, seed=1)


def prompts(asked: ArrivalList) -> set[tuple[int, ...]]:
    return {tuple(prompt_ids(asked, nth)[:8]) for nth in range(len(asked.arrivals))}


@pytest.mark.parametrize("workload", ["mixed", "trace"])
def test_no_two_lists_share_a_prompt_whatever_their_rate_and_repetition(tmp_path: Path, workload: str) -> None:
    lists = lists_of(tmp_path, workload)
    asked = [lists.of(workload, rate, 10, repetition=nth) for rate in (1.0, 1.19) for nth in (1, 2)]
    for one, other in combinations(asked, 2):
        assert not prompts(one) & prompts(other)


def test_each_repetition_asks_the_next_part_of_a_trace_at_the_rate(tmp_path: Path) -> None:
    lists = lists_of(tmp_path, "trace")
    lengths = [[one.prompt_tokens for one in lists.of("trace", 4.0, 10, repetition=nth).arrivals] for nth in range(3)]
    assert lengths == [list(range(100 + 10 * nth, 110 + 10 * nth)) for nth in range(3)]
    assert lists.of("trace", 4.0, 10, repetition=2).rate == pytest.approx(4.0)


def test_a_trace_comes_in_bursts_where_that_is_asked_for(tmp_path: Path) -> None:
    lists = lists_of(tmp_path, "trace", arrivals="gamma:3")
    assert "gamma arrivals, cv 3 in place of its own" in lists.of("trace", 1.0, 10, repetition=1).notes[-1]


def test_drawn_lengths_are_the_same_at_every_rate_and_others_with_each_repetition(tmp_path: Path) -> None:
    lists = lists_of(tmp_path, "mixed")
    slow, fast, again = (lists.of("mixed", rate, 10, repetition=nth) for rate, nth in ((1.0, 1), (2.0, 1), (1.0, 2)))
    tokens = [[one.prompt_tokens for one in asked.arrivals] for asked in (slow, fast, again)]
    assert tokens[0] == tokens[1] != tokens[2]
    assert lists.of("mixed", 1.0, 10, repetition=1).digest == slow.digest


def test_a_workload_that_is_given_twice_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="must name each once"):
        lists_of(tmp_path, "mixed", "mixed")
