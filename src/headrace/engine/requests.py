"""What an engine is asked for and what it tells: plain records, all frozen. Owns nothing, loads no torch."""

from dataclasses import dataclass
from typing import Literal

from headrace.errors import InputError

Tier = Literal["interactive", "flex"]
TIERS: tuple[Tier, ...] = ("interactive", "flex")
"""From the one that is served first to the one that is preempted first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """temperature 0 is greedy; top_k 0 and top_p 1 keep every token. `seed` and `choice` key the draws."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    choice: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 100:
            raise InputError("temperature", f"must be in 0..100, is {self.temperature}")
        if self.top_k < 0:
            raise InputError("top_k", f"must be at least 0 (0: all), is {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise InputError("top_p", f"must be above 0 and at most 1, is {self.top_p}")
        if not 0 <= self.seed < 2**63:
            raise InputError("seed", f"must be in 0..2**63-1, is {self.seed}")
        if not 0 <= self.choice < 2**32:
            raise InputError("choice", f"must be in 0..2**32-1, is {self.choice}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """`token_ids` is everything known: the prompt, and what was generated elsewhere before. `max_tokens` more come."""

    request_id: str
    token_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    stop_token_ids: frozenset[int]
    tier: Tier = "interactive"

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise InputError("token_ids", "must be at least one")
        if self.max_tokens < 1:
            raise InputError("max_tokens", f"must be at least 1, is {self.max_tokens}")
        if self.tier not in TIERS:
            raise InputError("tier", f"must be one of {', '.join(TIERS)}, is {self.tier!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The pages that a request now holds. Those of [cached_len, n-1) are to be filled, by the engine or from
    elsewhere; `hashes` are of the prompt's whole pages, for whoever indexes them."""

    request_id: str
    token_ids: tuple[int, ...]
    cached_len: int  # h, tokens
    pages: tuple[int, ...]  # page table, growth included
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewToken:
    """`index` counts a request's tokens from 0, also over preemptions. A stop token is no NewToken."""

    request_id: str
    index: int
    token_id: int


DoneReason = Literal["stop", "length", "aborted", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDone:
    """The one end of an admitted request. `reason` "stop": a stop token came; "length": max_tokens were generated;
    "aborted": `abort` was called; "failed": the step that computed it raised, `text` says what."""

    request_id: str
    reason: DoneReason
    text: str
    num_tokens: int  # generated here, the stop token included
    cached_len: int  # tokens of the prompt that nobody computed for this request
    num_preemptions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStep:
    """A request's first token was sampled in a step of this length, which began at that time."""

    request_id: str
    began_at: float
    step_s: float
    cached_len: int  # as RequestDone will say


EngineOutput = NewToken | RequestDone | FirstStep


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """`chunk_tokens`: prompt tokens computed in one step beside the decode rows, at most. `max_running`: requests that
    hold pages at once. `sample_from_prefill`: the last prompt token is part of the last chunk and its row is sampled
    from (colocated); else it is the first decode query, as after a transfer. None of both means no budget:

    tpot_s         a step that decodes is to take so long at most: who would make it longer does not enter
    max_stall_s    the same of a step that decodes and prefills: chunks are cut, who enters is not asked
    """

    page_size: int
    chunk_tokens: int = 256
    max_running: int = 32
    max_model_len: int
    sample_from_prefill: bool = False
    tpot_s: float | None = None
    max_stall_s: float | None = None

    def __post_init__(self) -> None:
        for field in ("page_size", "chunk_tokens", "max_running", "max_model_len"):
            if getattr(self, field) < 1:
                raise InputError(field, f"must be at least 1, is {getattr(self, field)}")
        for field in ("tpot_s", "max_stall_s"):
            bound = getattr(self, field)
            if bound is not None and not bound > 0:
                raise InputError(field, f"must be above 0, or None for no bound, is {bound}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatistics:
    """Requests by state now, and counts since the start."""

    num_decoding: int
    num_prefilling: int
    num_fetching: int  # their KV comes from elsewhere
    num_admitted: int  # hold pages, neither started nor fetched yet
    num_parked: int  # their fetch failed, what comes next is not decided: hold no pages
    num_waiting: int  # preempted, or back from a failed ticket: hold no pages
    num_waiting_tokens: int  # known tokens that are still to be computed here before their request decodes
    num_interactive_tokens: int  # those of them that are interactive
    num_interactive: int  # requests that hold pages
    num_steps: int
    num_prefill_tokens: int  # computed in chunks
    num_decode_tokens: int  # drawn, stop tokens included
    num_cached_tokens: int  # of prompts, computed by nobody
    num_preemptions: int
    num_finished: int
