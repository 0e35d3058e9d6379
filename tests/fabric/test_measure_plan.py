"""What is to be measured, ratios of pairs, and the verdict: all pure."""

from dataclasses import replace

import numpy as np
import pytest

from headrace.errors import InputError
from headrace.fabric.measure.plan import FULL, KIB, MIB, QUICK, Plan
from headrace.fabric.measure.ratios import median_ratio, spread
from headrace.fabric.measure.records import PageLimit, PageRates, Rest, Spread, TransportMeasured
from headrace.fabric.measure.verdict import judge

# ---- the plan


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"page_sizes": ()}, "sizes"),
        ({"page_sizes": (0,)}, "sizes"),
        ({"page_sizes": (4096, 4096)}, "sizes"),
        ({"page_sizes": (127,)}, "sizes"),
        ({"num_bytes": MIB - 1}, "num_bytes"),
        ({"num_bytes": 256 * MIB + 1}, "num_bytes"),
        ({"num_pairs": 0}, "plan"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_by_the_field(wrong: dict[str, object], field: str) -> None:
    with pytest.raises(InputError) as refused:
        replace(FULL, **wrong)  # type: ignore[arg-type]
    assert refused.value.field == field


def test_the_pages_of_a_run_are_a_quarter_of_the_memory_and_a_thousand_small_ones_always_fit() -> None:
    assert Plan(num_bytes=64 * MIB).region_bytes == 256 * MIB
    assert Plan(num_bytes=64 * KIB, page_sizes=(4096,)).region_bytes >= 1000 * 4096


def test_the_quick_plan_measures_the_same_cells_as_the_full_one() -> None:
    assert QUICK.page_sizes == FULL.page_sizes and QUICK.num_rounds > 0 and QUICK.rest_s > 0
    assert FULL.num_pairs >= 20


# ---- ratios


def test_a_spread_goes_from_the_lowest_to_the_highest() -> None:
    assert spread([3.0, 1.0, 2.0, 10.0]) == Spread(median=2.5, low=1.0, high=10.0)


def test_what_disturbs_both_of_a_pair_falls_out_of_their_ratio() -> None:
    disturbed = np.random.default_rng(2).uniform(1, 100, 21)
    ratio = median_ratio(list(0.9 * disturbed), list(disturbed))
    assert ratio.median == pytest.approx(0.9) and ratio.low == pytest.approx(0.9) == ratio.high


def test_the_interval_holds_the_median_and_is_narrower_than_the_ratios() -> None:
    values = list(np.random.default_rng(3).normal(1.0, 0.2, 25))
    ratio = median_ratio(values, [1.0] * 25)
    assert min(values) < ratio.low < ratio.median < ratio.high < max(values)
    assert ratio.low < 1.0 < ratio.high
    assert ratio == median_ratio(values, [1.0] * 25)


def test_one_pair_has_an_interval_of_no_width() -> None:
    assert median_ratio([1.0], [4.0]) == Spread(median=0.25, low=0.25, high=0.25)


# ---- the verdict


def rates(share: Spread, *, page_bytes: int = 16 * KIB, is_whole: bool = True) -> PageRates:
    some = Spread(median=1e9, low=9e8, high=2e9)
    first = PageLimit(name="copy avx2", bytes_per_s=some, cpu_s_per_gb=0.1, share=share)
    second = PageLimit(name="tcp", bytes_per_s=some, cpu_s_per_gb=0.1, share=Spread(median=0.01, low=0.01, high=0.01))
    return PageRates(
        page_bytes=page_bytes,
        num_bytes=MIB,
        num_pairs=5,
        is_whole=is_whole,
        bytes_per_s=some,
        cpu_s_per_gb=0.1,
        limits=(first, second),
    )


GOOD = Spread(median=0.9, low=0.8, high=1.0)
BAD = Spread(median=0.3, low=0.2, high=0.49)
UNSURE = Spread(median=0.49, low=0.3, high=0.51)
WELL = TransportMeasured(
    transport="mapped", pages=(rates(GOOD),), times=(), rest=Rest(seconds=1.0, process=0.002, owner=0.001), error=None
)


def test_only_the_first_limit_is_one_to_come_near_to() -> None:
    verdict = judge(WELL)
    assert verdict.is_ok and verdict.doubts == ()


def test_below_the_floor_is_what_even_the_upper_end_of_the_interval_says() -> None:
    verdict = judge(replace(WELL, pages=(rates(GOOD), rates(BAD, page_bytes=MIB))))
    assert not verdict.is_ok
    assert verdict.problems == ("pages of 1 MiB: 0.30 (0.20-0.49) of the bare copy avx2, below the floor of 0.5",)


def test_a_median_below_the_floor_that_may_be_chance_is_a_doubt() -> None:
    verdict = judge(replace(WELL, pages=(rates(UNSURE, page_bytes=3 * KIB),)))
    assert verdict.is_ok
    assert len(verdict.doubts) == 1 and verdict.doubts[0].startswith("pages of 3 KiB: 0.49 (0.30-0.51)")


def test_the_floor_is_the_callers() -> None:
    pages = (rates(BAD), rates(GOOD, page_bytes=100))
    assert judge(replace(WELL, pages=pages), floor=0.2).is_ok
    assert [problem.split(":")[0] for problem in judge(replace(WELL, pages=pages), floor=1.0).problems] == [
        "pages of 16 KiB"
    ]
    assert judge(replace(WELL, pages=pages), floor=1.0).doubts[0].startswith("pages of 100 B")


def test_wrong_bytes_are_never_good_enough() -> None:
    assert judge(replace(WELL, pages=(rates(GOOD, is_whole=False),)), floor=0.0).problems == (
        "pages of 16 KiB: wrong bytes arrived",
    )


def test_a_process_that_does_not_rest_is_told() -> None:
    busy = Rest(seconds=1.0, process=0.011, owner=0.0)
    assert judge(replace(WELL, rest=busy)).problems == ("at rest: 1.1% of a core, above the 1% that is allowed",)
    assert judge(replace(WELL, rest=None)).is_ok


def test_what_failed_is_told_with_what_was_measured_before() -> None:
    verdict = judge(replace(WELL, pages=(rates(BAD),), error="fi_getinfo: No data available (61)"))
    assert [problem.split(":")[0] for problem in verdict.problems] == ["failed", "pages of 16 KiB"]
