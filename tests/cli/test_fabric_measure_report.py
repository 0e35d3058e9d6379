"""What `headrace fabric selftest` and `bench` show of measurements: tables, verdicts, JSON; all pure."""

import json
from dataclasses import replace
from typing import Any

from headrace.cli.fabric.measure_report import described, described_verdicts, head, rendered, rendered_verdicts
from headrace.cli.tables import aligned
from headrace.fabric.measure.plan import FULL, KIB, MIB
from headrace.fabric.measure.records import PageLimit, PageRates, Rest, Spread, TimeLimit, Times, TransportMeasured
from headrace.fabric.measure.verdict import Verdict

WIDE = Spread(median=123.456e9, low=100.0e9, high=200.0e9)
SHARE = Spread(median=0.95, low=0.9, high=10.25)
LIMIT_NAMES = ("tcp;ofi_rxm", "tcp")


def page_rates(page_bytes: int, *, is_whole: bool = True) -> PageRates:
    limits = tuple(PageLimit(name=name, bytes_per_s=WIDE, cpu_s_per_gb=11.5, share=SHARE) for name in LIMIT_NAMES)
    return PageRates(
        page_bytes=page_bytes,
        num_bytes=MIB,
        num_pairs=5,
        is_whole=is_whole,
        bytes_per_s=WIDE,
        cpu_s_per_gb=10.0,
        limits=limits,
    )


def times(kind: Any, limit: str | None) -> Times:
    p50, p99 = Spread(median=123_456.0, low=1000.0, high=9_999_999.0), Spread(median=9e6, low=1.0, high=1e9)
    beside = None if limit is None else TimeLimit(name=limit, p50_ns=p50, p99_ns=p99, share=SHARE)
    return Times(kind=kind, num_rounds=9, num_pairs=5, pause_s=0.0, p50_ns=p50, p99_ns=p99, limit=beside)


MEASURED = TransportMeasured(
    transport="tcp",
    pages=tuple(page_rates(size) for size in (16 * KIB, 64 * KIB, 256 * KIB, MIB, 2 * MIB)),
    times=(
        times("owner", "tcp;ofi_rxm"),
        times("owner_asleep", "futex"),
        times("submit", None),
        times("coroutine", "eventfd one way"),
    ),
    rest=Rest(seconds=1.0, process=0.0012, owner=0.0007),
    error=None,
)


def test_tables_fit_eighty_columns_and_show_every_cell() -> None:
    text = rendered(MEASURED)
    assert max(len(line) for line in text.splitlines()) <= 80
    tables = [line for line in text.splitlines() if line.startswith("| GB/s")]
    assert [[cell.strip() for cell in line.strip("|").split("|")][1:] for line in tables] == [
        ["16KiB", "64KiB", "256KiB", "1MiB"],
        ["2MiB"],
    ]
    pages, _, _ = text.partition("| us")
    assert pages.count("123") == 3 * 5 and pages.count("100-200") == 3 * 5 and pages.count("0.90-10.2") == 2 * 5
    assert "raw socket" in text and "engine / bare tcp;ofi_rxm" in text and "bare eventfd, one way" in text
    assert "0.12% of a core for the process, 0.07% for its owner thread" in text
    assert "WRONG" not in text


def test_wrong_bytes_and_what_failed_stand_out() -> None:
    text = rendered(replace(MEASURED, pages=(page_rates(4096, is_whole=False),), error="fi_av_insert: no (22)"))
    assert "| bytes" in text and "WRONG" in text
    assert "It failed there: fi_av_insert: no (22)" in text
    assert rendered(TransportMeasured(transport="efa", pages=(), times=(), rest=None, error="none (61)")) == (
        "## efa\n\nIt failed there: none (61)\n"
    )


def test_the_head_says_what_was_done_and_where() -> None:
    text = head(FULL, machine="a machine", peer="10.0.0.7:4000")
    assert "a machine" in text and "10.0.0.7:4000" in text and "64MiB" in text and "256MiB" in text
    assert "this machine" in head(FULL, machine="a machine", peer="local")


def test_verdicts_are_one_line_each_and_their_reasons() -> None:
    verdicts = [
        Verdict(transport="mapped", problems=(), doubts=()),
        Verdict(transport="tcp", problems=("too slow",), doubts=("perhaps",)),
        Verdict(transport="efa", problems=(), doubts=("perhaps",)),
    ]
    assert rendered_verdicts(verdicts, 0.5) == (
        "mapped: OK, at least 0.5 of the bare loop at every page size\n"
        "tcp: NOT OK\n  too slow\n  perhaps\n"
        "efa: OK as far as can be told\n  perhaps\n"
    )


def test_the_json_has_a_version_and_the_fields_of_the_records() -> None:
    told = json.loads(json.dumps(described(FULL, [MEASURED], machine="a machine", peer="local", steal=0.01)))
    assert sorted(told) == ["machine", "peer", "plan", "steal", "transports", "version"]
    assert told["version"] == 1 and told["plan"]["region_bytes"] == 256 * MIB
    (transport,) = told["transports"]
    assert sorted(transport) == ["error", "pages", "rest", "times", "transport"]
    assert sorted(transport["pages"][0]) == [
        *("bytes_per_s", "cpu_s_per_gb", "is_whole", "limits", "num_bytes", "num_pairs", "page_bytes")
    ]
    assert sorted(transport["pages"][0]["limits"][0]) == ["bytes_per_s", "cpu_s_per_gb", "name", "share"]
    assert sorted(transport["times"][0]) == [
        *("kind", "limit", "num_pairs", "num_rounds", "p50_ns", "p99_ns", "pause_s")
    ]
    assert transport["times"][2]["limit"] is None
    assert transport["pages"][0]["limits"][0]["share"] == {"median": 0.95, "low": 0.9, "high": 10.25}
    verdicts = described_verdicts([Verdict(transport="tcp", problems=("p",), doubts=())], 0.5)
    assert json.loads(json.dumps(verdicts)) == {
        "floor": 0.5,
        "is_ok": False,
        "verdicts": [{"transport": "tcp", "problems": ["p"], "doubts": [], "is_ok": False}],
    }


def test_a_table_is_as_wide_as_its_widest_cells() -> None:
    assert list(aligned([["a", "bbb"], ["long", "1"]])) == ["| a    | bbb |", "|------|----:|", "| long |   1 |"]
