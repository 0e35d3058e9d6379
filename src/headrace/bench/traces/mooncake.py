"""Mooncake's traces: times, lengths, and the hashes of a prompt's blocks of 512 tokens, by which prefixes are shared.

Source: github.com/kvcache-ai/Mooncake, Apache-2.0; Qin et al., Mooncake (FAST 2025). Times are of whole seconds: those
of one instant are spread over the time until the next one.
"""

import random
from collections.abc import Iterator, Sequence
from itertools import groupby

import msgspec

from headrace.bench.traces.lines import Line, Reader
from headrace.bench.workload import Arrival
from headrace.errors import InputError

BLOCK_TOKENS = 512


class _Request(msgspec.Struct):
    timestamp: float  # milliseconds
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def _read(lines: Iterator[Line], seed: int, begin_s: float) -> Iterator[Arrival | None]:
    draw = random.Random(f"mooncake, {seed}")
    origin: float | None = None
    waiting: list[_Request] = []
    for _, group in groupby(map(_request, lines), key=lambda one: one.timestamp):
        at_once = list(group)
        origin = at_once[0].timestamp if origin is None else origin
        if waiting:
            yield from _spread(waiting, origin, at_once[0].timestamp - waiting[0].timestamp, draw)
        waiting = at_once
    if waiting and origin is not None:
        yield from _spread(waiting, origin, 1000.0, draw)


def _spread(
    at_once: Sequence[_Request], origin: float, step_ms: float, draw: random.Random
) -> Iterator[Arrival | None]:
    """In their order, at drawn times of the step."""
    offsets = sorted(draw.uniform(0, max(0.0, step_ms)) for _ in at_once) if len(at_once) > 1 else [0.0]
    for request, offset in zip(at_once, offsets, strict=True):
        if request.input_length < 1 or request.output_length < 1:
            yield None
            continue
        yield Arrival(
            at_s=(request.timestamp - origin + offset) / 1000,
            prompt_tokens=request.input_length,
            max_tokens=request.output_length,
            blocks=request.hash_ids[: request.input_length // BLOCK_TOKENS],
        )


def _request(line: Line) -> _Request:
    try:
        return msgspec.json.decode(line.text, type=_Request)
    except msgspec.DecodeError as error:
        raise InputError(line.place, f"must be a request of Mooncake's: {error}") from error


READER = Reader(
    name="Mooncake",
    read=_read,
    begins_with='{"timestamp":',
    block_tokens=BLOCK_TOKENS,
    notes=("its times are coarse: requests of one instant are spread, at random, over the time until the next one",),
)
