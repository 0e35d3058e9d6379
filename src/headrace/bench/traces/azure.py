"""Azure's LLM inference traces of 2023 (code, conversation) and 2024 (the same, a week each).

Source: github.com/Azure/AzurePublicDataset, CC-BY-4.0; Patel et al., Splitwise (ISCA 2024), and Stojkovic et al.,
DynamoLLM (HPCA 2025).
"""

from collections.abc import Iterator
from datetime import datetime

from headrace.bench.traces.lines import Line, Reader, asked
from headrace.bench.workload import Arrival
from headrace.errors import InputError


def _read(lines: Iterator[Line], seed: int, begin_s: float) -> Iterator[Arrival | None]:
    origin: datetime | None = None
    for line in lines:
        at = _time(line)
        origin = origin or at
        yield asked((at - origin).total_seconds(), line.count("ContextTokens"), line.count("GeneratedTokens"))


def _time(line: Line) -> datetime:
    """Of seven decimals in 2023, with a zone in 2024."""
    word = line.word("TIMESTAMP")
    try:
        return datetime.fromisoformat(word)
    except ValueError:
        raise InputError(line.place, f"must have a date and time as TIMESTAMP, has {word[:40]!r}") from None


READER = Reader(name="Azure", read=_read, columns=("TIMESTAMP", "ContextTokens", "GeneratedTokens"))
