"""The prefiller's engine: prompts that are computed in chunks, for somebody else to decode.

Owns the prompts that are not computed yet, when each was added and begun, and what steps took; their pages belong to
whoever adds them. The order is the engine's (`schedule.plan_chunks`). Knows no tickets, no pages as a resource and no
clock; the loop of the role owns it. The life of a prompt:

    add --> queued --next_step--> in a step --commit--> queued | done, when its last chunk is computed
              `---- drop             `-- fail, or dropped meanwhile: gone with the end of the step
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from headrace.engine.cost import PrefillSpeed, StepSize
from headrace.engine.measured_cost import MeasuredCost
from headrace.engine.requests import Tier
from headrace.engine.schedule import Chunk, Prefilling, plan_chunks, size_beside
from headrace.engine.step import Step, StepRow
from headrace.errors import InputError
from headrace.model.batch import Row

Key = TypeVar("Key", bound=Hashable)

FORGET_S = 60.0
"""Its speed, without a step: who seemed slow is given nothing, and would seem slow for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt(Generic[Key]):
    """Positions [computed, n-1) of the n token ids are to be computed, into `pages` (page table from position 0)."""

    key: Key
    tier: Tier
    token_ids: Sequence[int]
    pages: Sequence[int]
    computed: int

    @property
    def end(self) -> int:
        return len(self.token_ids) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillStep(Step, Generic[Key]):
    """One chunk for each row."""

    chunks: tuple[Chunk[Key], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptDone(Generic[Key]):
    """The prompt's last chunk is computed: from `add` to its first step, and from there to the end of its last."""

    key: Key
    num_computed: int
    queue_s: float
    prefill_s: float


@dataclass(slots=True, kw_only=True, eq=False)
class _Queued(Generic[Key]):
    prompt: Prompt[Key]
    order: int
    added_at: float
    computed: int
    begun_at: float | None = None


@dataclass(frozen=True, slots=True)
class _Running(Generic[Key]):
    step: PrefillStep[Key]
    queued: tuple[_Queued[Key], ...]  # of its rows


class PrefillQueue(Generic[Key]):
    def __init__(self, *, chunk_tokens: int) -> None:
        if chunk_tokens < 1:
            raise InputError("chunk_tokens", f"must be at least 1, is {chunk_tokens}")
        self._chunk_tokens = chunk_tokens
        self._queued: dict[Key, _Queued[Key]] = {}
        self._running: _Running[Key] | None = None
        self._num_added = 0
        self._num_steps = 0
        self._num_computed = 0
        self._costs = MeasuredCost()
        self._committed_at = 0.0

    def add(self, prompt: Prompt[Key], now: float) -> None:
        """Raises InputError when there is nothing to compute, or the key is here."""
        if not 0 <= prompt.computed < prompt.end:
            raise InputError("computed", f"must be in 0..{prompt.end - 1}, before the last token, is {prompt.computed}")
        if prompt.key in self._queued:
            raise InputError("key", f"must be new, {prompt.key!r} is queued")
        self._queued[prompt.key] = _Queued(prompt=prompt, order=self._num_added, added_at=now, computed=prompt.computed)
        self._num_added += 1

    def drop(self, key: Key) -> None:
        """No further step is planned for it. Idempotent; a step that runs is still to be committed or failed."""
        self._queued.pop(key, None)

    def next_step(self, now: float) -> PrefillStep[Key] | None:
        """None when nothing is queued. At most one step runs at a time."""
        assert self._running is None, f"step {self._num_steps} is running"
        chunks = plan_chunks([_as_prefilling(queued) for queued in self._queued.values()], self._chunk_tokens)
        if not chunks:
            return None
        queued = tuple(self._queued[chunk.key] for chunk in chunks)
        for one in queued:
            one.begun_at = now if one.begun_at is None else one.begun_at
        self._num_steps += 1
        rows = tuple(_row(one.prompt, chunk) for one, chunk in zip(queued, chunks, strict=True))
        size = size_beside(StepSize(), chunks)
        step = PrefillStep(number=self._num_steps, began_at=now, rows=rows, size=size, chunks=tuple(chunks))
        self._running = _Running(step, queued)
        return step

    def commit(self, step: PrefillStep[Key], now: float) -> list[PromptDone[Key]]:
        """The step's KV is in its pages -> the prompts that are through. What was dropped meanwhile is not."""
        done = []
        self._costs.learn(step.size, now - step.began_at)
        self._committed_at = now
        for queued, chunk in zip(self._end_step(step), step.chunks, strict=True):
            queued.computed = chunk.end
            self._num_computed += chunk.end - chunk.begin
            if self._is_queued(queued) and chunk.end == queued.prompt.end:
                done.append(_done(queued, now))
                self.drop(chunk.key)
        return done

    def fail(self, step: PrefillStep[Key]) -> list[Key]:
        """The step raised -> the prompts that were in it, which are gone."""
        failed = [queued.prompt.key for queued in self._end_step(step) if self._is_queued(queued)]
        for key in failed:
            self.drop(key)
        return failed

    def _end_step(self, step: PrefillStep[Key]) -> tuple[_Queued[Key], ...]:
        assert self._running is not None and self._running.step is step, f"step {step.number} is not running"
        queued, self._running = self._running.queued, None
        return queued

    def _is_queued(self, queued: _Queued[Key]) -> bool:
        """By identity: its key may have been dropped, and added anew with other pages."""
        return self._queued.get(queued.prompt.key) is queued

    # ---- state shows itself ------------------------------------------------------------------------------------

    @property
    def num_queued(self) -> int:
        return len(self._queued)

    @property
    def num_queued_tokens(self) -> int:
        return sum(queued.prompt.end - queued.computed for queued in self._queued.values())

    def prefill_speed(self, now: float) -> PrefillSpeed | None:
        """As the last steps tell; None where there were none lately, or too few."""
        cost = self._costs.cost
        if cost is None or not cost.knows_chunks or now - self._committed_at > FORGET_S:
            return None
        return cost.prefill_speed(StepSize(), chunk_tokens=self._chunk_tokens, bound_s=None)

    @property
    def num_steps(self) -> int:
        return self._num_steps

    @property
    def num_computed_tokens(self) -> int:
        """In all committed steps, also of prompts that were dropped."""
        return self._num_computed

    def __repr__(self) -> str:
        return f"PrefillQueue({self.num_queued} prompts, {self.num_queued_tokens} tokens, step {self._num_steps})"


def _as_prefilling(queued: _Queued[Key]) -> Prefilling[Key]:
    prompt = queued.prompt
    return Prefilling(key=prompt.key, tier=prompt.tier, order=queued.order, computed=queued.computed, end=prompt.end)


def _row(prompt: Prompt[Key], chunk: Chunk[Key]) -> StepRow:
    token_ids = prompt.token_ids[chunk.begin : chunk.end]
    row = Row(token_ids=token_ids, begin=chunk.begin, page_table=prompt.pages, wants_logits=False)
    return StepRow(row=row, draw=None)


def _done(queued: _Queued[Key], now: float) -> PromptDone[Key]:
    assert queued.begun_at is not None, "done before it was begun"
    return PromptDone(
        key=queued.prompt.key,
        num_computed=queued.prompt.end - queued.prompt.computed,
        queue_s=queued.begun_at - queued.added_at,
        prefill_s=now - queued.begun_at,
    )
