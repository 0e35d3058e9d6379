import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from planted import planted

from headrace.bench.comparison import FILE, Comparison, read_comparison, run_file, write_comparison
from headrace.bench.metrics import Slo
from headrace.bench.records import Run, write_run
from headrace.bench.report.against import compared
from headrace.bench.report.figures import JSON, recheck
from headrace.bench.report.writing import CSV, HTML, write_report
from headrace.errors import InputError

HOSTILE = '<script>alert("1")</script>'


def written(directory: Path, comparison: Comparison, runs: list[Run]) -> Path:
    write_comparison(directory, comparison)
    for run in runs:
        head = run.head
        write_run(run_file(directory, comparison.arm(head.arm), head.workload, head.rate, head.repetition), run)
    return directory


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    slo = Slo(ttft_s=3.0, tpot_s=0.03)
    comparison, runs = planted(prompt_tokens=1000, rates=(0.2, 0.8), slo=slo, seed=3, repetitions=3)
    comparison = msgspec.structs.replace(
        comparison, model=HOSTILE, not_measured={"energy": "no counter"}, facts={"split 1:1": MEMORY}
    )
    folder = written(tmp_path_factory.mktemp("comparison"), comparison, runs)
    (folder / "screen").write_text(write_report(folder))
    return folder


MEMORY = {"memory_unique_bytes": 5e6, "memory_shared_bytes": 7e6, "memory_proportional_bytes": 9e6}


class Page(HTMLParser):
    """Tags that are opened and closed, attributes that lead elsewhere, and the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in {"meta", "br", "use", "path", "link"}:
            self.open.append(tag)
        self.links += [value or "" for name, value in attrs if name in {"src", "href"}]

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_needs_nothing_else_and_runs_nothing(directory: Path) -> None:
    html = (directory / HTML).read_text()
    page = Page()
    page.feed(html)
    assert page.open == [] and "script" not in page.tags and "svg" in page.tags
    assert not [link for link in page.links if not link.startswith("#")] and "@import" not in html
    assert "prefers-color-scheme: dark" in html and "@media print" in html and "width=device-width" in html
    assert HOSTILE in page.text and HOSTILE not in html


def test_the_page_tells_the_verdict_first_and_every_arm(directory: Path) -> None:
    told = msgspec.json.decode((directory / JSON).read_bytes())
    html = (directory / HTML).read_text()
    page = Page()
    page.feed(html)
    assert told["verdict"]["kind"] == "disaggregate from"
    assert page.text.index("disaggregate from 0.8 requests/s on") < page.text.index("Requests that kept both budgets")
    for clause in told["verdict"]["clauses"]:
        assert clause["text"] in page.text
    for arm in told["comparison"]["arms"]:
        assert arm["name"] in page.text
    assert not re.findall(r"#0[123]0[0-9]0[0-9]\b", html)  # every stand-in became a colour of the page


def test_one_screen_is_one_screen_and_says_the_same(directory: Path) -> None:
    lines = (directory / "screen").read_text().splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    assert "DISAGGREGATE FROM 0.8 REQUESTS/S ON" in lines[1]


def test_the_table_has_every_figure_of_every_run(directory: Path) -> None:
    rows = [line.split(",") for line in (directory / CSV).read_text().splitlines() if '"' not in line]
    assert rows[0] == ["arm", "workload", "rate", "repetition", "class", "figure", "value"]
    text = (directory / CSV).read_text()
    assert text.count(",attainment,") == text.count(",stall_s,") == 2 * 3 * 3 + 0
    assert '"colocated, chunk 64"' in text


def test_every_figure_follows_from_the_records(directory: Path) -> None:
    assert recheck(directory) == []


def test_a_record_that_was_changed_is_noticed_by_the_figures_that_it_changes(tmp_path: Path) -> None:
    slo = Slo(ttft_s=3.0, tpot_s=0.03)
    folder = written(tmp_path, *planted(prompt_tokens=300, rates=(0.5,), slo=slo, seed=1, repetitions=2))
    write_report(folder)
    file = next((folder / "runs").rglob("*.jsonl"))
    lines = file.read_text().splitlines()
    late = re.sub(r'"arrival_s":[\d.]+', '"arrival_s":0.0', lines[20])
    file.write_text("\n".join([*lines[:20], late, *lines[21:]]) + "\n")
    differences = recheck(folder)
    assert any("ttft" in text and "the records" in text for text in differences)


def test_a_comparison_that_was_interrupted_says_so(tmp_path: Path) -> None:
    slo = Slo(ttft_s=3.0, tpot_s=0.03)
    comparison, runs = planted(prompt_tokens=300, rates=(0.5,), slo=slo, seed=1, repetitions=1)
    folder = written(tmp_path, msgspec.structs.replace(comparison, is_whole=False), runs[:1])
    assert "CANNOT TELL" in write_report(folder)
    assert "This comparison was interrupted" in (folder / HTML).read_text()


def test_two_comparisons_tell_first_what_is_not_the_same(directory: Path, tmp_path: Path) -> None:
    slo = Slo(ttft_s=3.0, tpot_s=0.03)
    comparison, runs = planted(prompt_tokens=1000, rates=(0.2, 0.8), slo=slo, seed=4, repetitions=3)
    other = written(tmp_path, msgspec.structs.replace(comparison, machine="another"), runs)
    told = compared(directory, other)
    assert told.index("machine: none and another") < told.index("split 1:1, planted, 0.8/s")
    assert "seed: 3 and 4" in told and "lists of the same workload" in told
    assert "the same conditions" in compared(directory, directory)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, f"must be the directory of a comparison, has no {FILE}"),
        ('{"format": 7}', "format: must be 1, which this headrace writes, is 7"),
        ('{"format": 1, "began": 3}', "must be a comparison: "),
        ("nonsense", "must be a comparison: "),
    ],
)
def test_a_directory_that_holds_none_is_told(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / FILE).write_text(text)
    with pytest.raises(InputError, match=re.escape(said)):
        read_comparison(tmp_path)


def test_arms_without_a_common_rate_have_tables_and_no_pictures_of_pairs(tmp_path: Path) -> None:
    slo = Slo(ttft_s=3.0, tpot_s=0.03)
    comparison, runs = planted(prompt_tokens=300, rates=(0.5, 1.0), slo=slo, seed=1, repetitions=1)
    apart = [run for run in runs if (run.head.arm == "split 1:1") == (run.head.rate == 1.0)]
    folder = written(tmp_path, comparison, apart)
    assert "CANNOT TELL" in write_report(folder)
    assert "The same arrivals in both" not in (folder / HTML).read_text()
