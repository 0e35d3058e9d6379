from pathlib import Path

import pytest

from headrace.bench.records import RequestRecord, Run, RunEnd, RunHead, Waterfall, read_run, write_run
from headrace.errors import InputError

HEAD = RunHead(
    arm="split 1:1", workload="short", digest="d", rate=2.0, repetition=1, num_warm=3, began="2026-01-01", devices=2
)
ONE = RequestRecord(
    index=0,
    id="cmpl-1",
    arrival_s=0.0,
    sent_s=0.001,
    prompt_tokens=8,
    max_tokens=2,
    token_s=(0.1, 0.2),
    waterfall=Waterfall(prefill_s=0.05),
)
RUN = Run(head=HEAD, requests=(ONE,), end=RunEnd(num_requests=1, steal_share=0.0, facts={"kv_bytes": 7.0}))


def test_a_run_is_read_as_it_was_written_and_leaves_no_part_behind(tmp_path: Path) -> None:
    file = tmp_path / "split" / "2-1.jsonl"
    write_run(file, RUN)
    assert read_run(file) == RUN and list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda lines: lines[:1], "must be a run: a head, its requests and an end"),
        (lambda lines: lines[:-1], ":2: must be a RunEnd"),
        (lambda lines: [lines[0], lines[2]], "must hold 1 requests, as its end says, holds 0"),
        (lambda lines: [lines[0], lines[1].replace("sent_s", "seen_s"), lines[2]], ":2: must be a RequestRecord"),
        (lambda lines: [lines[0].replace("2.0", '"2"'), *lines[1:]], ":1: must be a RunHead"),
    ],
)
def test_what_is_no_whole_run_is_told_by_file_and_line(tmp_path: Path, change: object, said: str) -> None:
    file = tmp_path / "run.jsonl"
    write_run(file, RUN)
    file.write_text("\n".join(change(file.read_text().splitlines())))  # type: ignore[operator]
    with pytest.raises(InputError, match=said):
        read_run(file)
