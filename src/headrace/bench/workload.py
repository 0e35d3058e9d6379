"""Arrival lists: when which request comes, how long its prompt is and how many tokens it is to get. Pure.

A list is a value: two arms that are given the same one are asked the same, token id for token id. Its digest says so.
"""

import hashlib
from collections.abc import Sequence

import msgspec

from headrace.protocol.messages import Tier


class Arrival(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`at_s`: since the begin of the list. `blocks`: names of the prompt's leading blocks of `block_tokens` tokens
    each; prompts share as many tokens as they share leading blocks. What no block names is this prompt's alone."""

    at_s: float
    prompt_tokens: int
    max_tokens: int
    blocks: tuple[int, ...] = ()
    tier: Tier = "interactive"


class ArrivalList(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """In order of time. `notes`: what was done to a trace to make it this list (clipped, scaled, jittered), each a
    sentence for the report. `seed` also draws the prompts' tokens."""

    name: str
    seed: int
    arrivals: tuple[Arrival, ...]
    block_tokens: int = 512
    notes: tuple[str, ...] = ()

    @property
    def duration_s(self) -> float:
        return self.arrivals[-1].at_s if self.arrivals else 0.0

    @property
    def rate(self) -> float:
        """Requests a second."""
        return (len(self.arrivals) - 1) / self.duration_s if self.duration_s > 0 else 0.0

    @property
    def digest(self) -> str:
        """Of everything that decides what is asked and when: not of the name, nor of notes."""
        asked = msgspec.json.encode((self.seed, self.block_tokens, self.arrivals))
        return hashlib.sha256(asked).hexdigest()


def scaled(arrivals: Sequence[Arrival], factor: float) -> tuple[Arrival, ...]:
    """The same requests, `factor` times as often."""
    return tuple(msgspec.structs.replace(arrival, at_s=arrival.at_s / factor) for arrival in arrivals)
