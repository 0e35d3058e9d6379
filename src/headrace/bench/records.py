"""What came of a request and of a run, as it is kept in files: raw, so that every figure can be computed again.

A run's file is JSON lines: first its `RunHead`, then a `RequestRecord` for each request in the order of the arrival
list, last its `RunEnd`. A file without an end is of a run that was interrupted, and counts as not there.

Seconds are since the run's origin, the instant that the first arrival's `at_s` is counted from: `arrival_s` is when a
request was to be sent, `sent_s` when it was, `token_s` when the bytes of each token were at the client.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import InputError
from headrace.protocol.messages import Tier


class Waterfall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the seconds to a first token went, as the server told; they add up to it, less what client and network
    took. None: not told, or not part of this way."""

    gateway_s: float | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    exposed_transfer_s: float | None = None
    hand_over_s: float | None = None
    first_step_s: float | None = None


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`id`: as the server calls it. `error`: what was answered instead of tokens, or where a stream broke.
    `num_reported`: completion tokens by the server's own count."""

    index: int
    id: str = ""
    arrival_s: float
    sent_s: float
    prompt_tokens: int
    max_tokens: int
    token_s: tuple[float, ...] = ()
    num_reported: int | None = None
    cached_tokens: int | None = None
    error: str | None = None
    tier: Tier = "interactive"
    waterfall: Waterfall | None = None


class RunHead(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="run"):
    """`rate`: requests a second that were offered. `num_warm`: of the first requests, in no figure."""

    arm: str
    workload: str
    digest: str  # of the arrival list
    rate: float
    repetition: int
    num_warm: int
    began: str  # ISO 8601, UTC
    devices: int


class RunEnd(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="end"):
    """`steal_share`: of the machine's time that went to other machines meanwhile. `facts`: what was measured beside the
    requests, such as KV bytes, seconds of transfer, joules; what could not be measured is absent."""

    num_requests: int
    steal_share: float
    facts: dict[str, float] = {}


class Run(msgspec.Struct, frozen=True, kw_only=True):
    head: RunHead
    requests: tuple[RequestRecord, ...]
    end: RunEnd

    @property
    def counted(self) -> Sequence[RequestRecord]:
        """Without the warm-up."""
        return self.requests[self.head.num_warm :]


def write_run(file: Path, run: Run) -> None:
    """Whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    encode = msgspec.json.encode
    part.write_bytes(b"\n".join([encode(run.head), *map(encode, run.requests), encode(run.end), b""]))
    part.replace(file)


def read_run(file: Path) -> Run:
    """Raises InputError, naming file and line, for what is no whole run."""
    lines = file.read_bytes().splitlines()
    if len(lines) < 2:
        raise InputError(str(file), "must be a run: a head, its requests and an end")
    types: Sequence[type] = [RunHead, *[RequestRecord] * (len(lines) - 2), RunEnd]
    parts: list[Any] = []
    for number, (line, kind) in enumerate(zip(lines, types, strict=True), start=1):
        try:
            parts.append(msgspec.json.decode(line, type=kind))
        except msgspec.DecodeError as error:
            raise InputError(f"{file}:{number}", f"must be a {kind.__name__}: {error}") from error
    head, *requests, end = parts
    if end.num_requests != len(requests):
        raise InputError(str(file), f"must hold {end.num_requests} requests, as its end says, holds {len(requests)}")
    return Run(head=head, requests=tuple(requests), end=end)
