"""Arrival lists: when which request comes, how long its prompt is and how many tokens it is to get. Pure.

A list is a value: two arms that are given the same one are asked the same, token id for token id. Its digest says so.
Whatever changes a list on its way from a trace to a run adds a sentence to its notes, which the report prints.
"""

import hashlib
from collections.abc import Sequence
from statistics import fmean

import msgspec

from headrace.errors import InputError
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
    """In order of time. `notes`: what was done to make it this list, each a sentence for the report. `seed` also draws
    the prompts' tokens."""

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
        """Requests a second; 0 where fewer than two tell one."""
        return (len(self.arrivals) - 1) / self.duration_s if self.duration_s > 0 else 0.0

    @property
    def digest(self) -> str:
        """Of everything that decides what is asked and when: not of the name, nor of notes."""
        asked = msgspec.json.encode((self.seed, self.block_tokens, self.arrivals))
        return hashlib.sha256(asked).hexdigest()


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """What model and machine take: a prompt, an answer, and both together."""

    max_prompt_tokens: int
    max_output_tokens: int
    max_model_len: int


# ---- from one list to another ----------------------------------------------------------------------------------


def cut(arrivals: ArrivalList, *, begin_s: float = 0.0, duration_s: float) -> ArrivalList:
    """The part of it that comes in that time; its first arrival is at 0. Raises InputError where nothing does."""
    kept = [one for one in arrivals.arrivals if begin_s <= one.at_s < begin_s + duration_s]
    if not kept:
        raise InputError(arrivals.name, f"must have requests from {begin_s:g} s on for {duration_s:g} s, has none")
    origin = kept[0].at_s
    note = f"{len(kept)} of {len(arrivals.arrivals)} requests, from {begin_s:g} s on for {duration_s:g} s"
    return _changed(arrivals, [_moved(one, one.at_s - origin) for one in kept], note)


def part(arrivals: ArrivalList, *, nth: int, num_requests: int) -> ArrivalList:
    """So many requests on end, the `nth` part of such a size (0 the first), its first arrival at 0. A list that is
    through begins again, where a whole part still fits; all of one that has fewer."""
    known = arrivals.arrivals
    if len(known) <= num_requests:
        return arrivals
    begin = nth % (len(known) // num_requests) * num_requests
    kept = known[begin : begin + num_requests]
    note = f"requests {begin + 1} to {begin + num_requests} of {len(known)}"
    return _changed(arrivals, [_moved(one, one.at_s - kept[0].at_s) for one in kept], note)


def at_rate(arrivals: ArrivalList, rate: float) -> ArrivalList:
    """Stretched in time to so many requests a second; order and burstiness stay as they are. Raises InputError."""
    if not rate > 0:
        raise InputError("rate", f"must be more than 0 requests a second, is {rate:g}")
    if not arrivals.rate:
        raise InputError(arrivals.name, "must have two requests at different times to be brought to a rate")
    factor = rate / arrivals.rate
    note = f"stretched in time from {arrivals.rate:.3g} to {rate:.3g} requests/s"
    return _changed(arrivals, [_moved(one, one.at_s / factor) for one in arrivals.arrivals], note)


def clipped(arrivals: ArrivalList, fit: Fit) -> ArrivalList:
    """Brought to what fits. Where prompts share blocks, all lengths are scaled down together by one power of two until
    nine of ten prompts fit, so that what was shared stays shared; what is too long even then is cut off."""
    shrunk = _shrunk(arrivals, fit)
    kept = [_clipped(one, fit) for one in shrunk.arrivals]
    num_changed = sum(now != before for now, before in zip(kept, shrunk.arrivals, strict=True))
    if not num_changed:
        return shrunk
    before, after = _mean_lengths(shrunk.arrivals), _mean_lengths(kept)
    note = (
        f"{num_changed} of {len(kept)} requests clipped to {fit.max_prompt_tokens} prompt and {fit.max_output_tokens} "
        f"output tokens, {fit.max_model_len} together: on average from {before} to {after} tokens"
    )
    return _changed(shrunk, kept, note)


def _shrunk(arrivals: ArrivalList, fit: Fit) -> ArrivalList:
    """Lists without shared blocks are clipped only."""
    lengths = sorted(one.prompt_tokens for one in arrivals.arrivals)
    if not any(one.blocks for one in arrivals.arrivals) or lengths[-1] <= fit.max_prompt_tokens:
        return arrivals
    longest, factor = lengths[len(lengths) * 9 // 10], 1
    while longest > factor * fit.max_prompt_tokens and arrivals.block_tokens >= 2 * factor * SMALLEST_BLOCK:
        factor *= 2
    if factor == 1:
        return arrivals
    kept = [
        msgspec.structs.replace(
            one, prompt_tokens=max(1, one.prompt_tokens // factor), max_tokens=max(1, one.max_tokens // factor)
        )
        for one in arrivals.arrivals
    ]
    block_tokens = arrivals.block_tokens // factor
    note = f"prompts, outputs and shared blocks are 1/{factor} of the trace's (blocks of {block_tokens} tokens)"
    return msgspec.structs.replace(_changed(arrivals, kept, note), block_tokens=block_tokens)


SMALLEST_BLOCK = 16
"""Tokens: a page, less than which nobody shares."""


def _clipped(one: Arrival, fit: Fit) -> Arrival:
    prompt_tokens = min(one.prompt_tokens, fit.max_prompt_tokens, fit.max_model_len - 1)
    return msgspec.structs.replace(
        one,
        prompt_tokens=prompt_tokens,
        max_tokens=min(one.max_tokens, fit.max_output_tokens, fit.max_model_len - prompt_tokens),
    )


def _mean_lengths(arrivals: Sequence[Arrival]) -> str:
    prompt, output = fmean(one.prompt_tokens for one in arrivals), fmean(one.max_tokens for one in arrivals)
    return f"{prompt:.0f} + {output:.0f}"


def _moved(one: Arrival, at_s: float) -> Arrival:
    return msgspec.structs.replace(one, at_s=at_s)


def _changed(arrivals: ArrivalList, kept: Sequence[Arrival], note: str) -> ArrivalList:
    return msgspec.structs.replace(arrivals, arrivals=tuple(kept), notes=(*arrivals.notes, note))
