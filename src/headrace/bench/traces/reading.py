"""Which reader a trace file is for. A reader takes lines and gives arrivals; wrong lines are told by file and line.

Files may be a week long: they are read line by line, and no further than the part that is wanted.
"""

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from headrace.bench.traces import azure, burstgpt, mooncake, servegen, vidur
from headrace.bench.traces.lines import Line, Reader
from headrace.bench.workload import Arrival, ArrivalList
from headrace.errors import InputError

READERS: Sequence[Reader] = (azure.READER, burstgpt.READER, mooncake.READER, servegen.READER, vidur.READER)
MOST_REQUESTS = 200_000
"""Of one part: some 100 MB, and more than a comparison asks for."""


def read_trace(
    file: Path,
    *,
    begin_s: float = 0.0,
    duration_s: float | None = None,
    most: int = MOST_REQUESTS,
    seed: int = 1,
) -> ArrivalList:
    """The part of a trace that begins `begin_s` after its first request, up to so many requests; its first arrival is
    at 0. Raises InputError naming the file, the line and what would be right."""
    reader = _reader_of(file)
    kept: list[Arrival] = []
    num_left_out = 0
    with file.open(encoding="utf-8", newline="") as lines:
        for arrival in reader.read(_lines(file, reader, lines), seed, begin_s):
            if arrival is None:
                num_left_out += 1
                continue
            if duration_s is not None and arrival.at_s >= begin_s + duration_s:
                break
            if arrival.at_s >= begin_s:
                kept.append(arrival)
            if len(kept) == most:
                break
    if not kept:
        raise InputError(str(file), f"must have requests from {begin_s:g} s on, has none")
    kept.sort(key=lambda one: one.at_s)
    origin = kept[0].at_s
    notes = [f"{reader.name}: {file.name}, {len(kept)} requests from {begin_s:g} s on", *reader.notes]
    if num_left_out:
        notes.append(f"{num_left_out} requests without a prompt or an answer are left out")
    return ArrivalList(
        name=file.stem,
        seed=seed,
        arrivals=tuple(msgspec.structs.replace(one, at_s=one.at_s - origin) for one in kept),
        block_tokens=reader.block_tokens,
        notes=tuple(notes),
    )


def _reader_of(file: Path) -> Reader:
    if not file.is_file():
        raise InputError("workload", f"must be a trace file that is there, is {file}")
    try:
        with file.open(encoding="utf-8") as lines:
            first = lines.readline(4096).strip()
    except UnicodeDecodeError as error:
        raise InputError(str(file), f"must be text: {error}") from error
    for reader in READERS:
        if reader.is_for(first):
            return reader
    known = "; ".join(f"{reader.name} ({reader.first_line})" for reader in READERS)
    raise InputError(f"{file}:1", f"must be the first line of one of: {known}; is {first[:80]!r}")


def _lines(file: Path, reader: Reader, lines: Iterator[str]) -> Iterator[Line]:
    """JSON lines as they are, CSV by the names of its columns."""
    if reader.columns is None:
        for number, text in enumerate(lines, start=1):
            if text.strip():
                yield Line(place=f"{file}:{number}", text=text)
        return
    rows = csv.DictReader(lines, restval="")
    for row in rows:
        yield Line(place=f"{file}:{rows.line_num}", fields=row)
