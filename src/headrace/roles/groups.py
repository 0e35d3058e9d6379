"""The data-parallel groups of a decoder: which of them takes a request, and the step that they compute together.

Owns an engine for the pages of each; runs on the role's loop. A request stays where it was admitted, with all its KV;
that group's engine is asked for by the request's id. Experts are spread over the ranks of all groups, so a step is
everybody's: a group that has nothing to compute takes part in it with no rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from headrace.engine.cost import PrefillSpeed, StepSize
from headrace.engine.engine import Engine
from headrace.engine.measured_cost import MeasuredCost
from headrace.engine.requests import (
    Admission,
    EngineOptions,
    EngineOutput,
    EngineRequest,
    EngineStatistics,
)
from headrace.engine.step import Step, StepRow
from headrace.errors import InputError
from headrace.kvcache.pages import PagePool
from headrace.kvcache.prefix import page_hashes


@dataclass(frozen=True, slots=True)
class GroupsStep:
    """One step of every group; None of one that has nothing to compute."""

    steps: tuple[Step | None, ...]

    @property
    def rows(self) -> list[Sequence[StepRow]]:
        return [() if step is None else step.rows for step in self.steps]

    @property
    def size(self) -> StepSize:
        """Of the group that has most to compute, for which the others wait."""
        sizes = [step.size for step in self.steps if step is not None]
        return max(sizes, key=lambda size: (size.rows + size.chunk_tokens, size.keys))

    @property
    def began_at(self) -> float:
        return next(step.began_at for step in self.steps if step is not None)


class Groups:
    """`pools` are the pages of each group; the rest as `Engine` takes it."""

    def __init__(self, pools: Sequence[PagePool], *, options: EngineOptions, salt: bytes, vocab_size: int) -> None:
        self.costs = MeasuredCost()
        """What steps cost: of a group's own rows, in the time that all groups took."""
        self._pools = pools
        self._page_size = options.page_size
        self._salt = salt
        self._engines = [
            Engine(pages=pages, options=options, salt=salt, vocab_size=vocab_size, costs=self.costs) for pages in pools
        ]

    # ---- requests ----------------------------------------------------------------------------------------------

    def try_admit(self, request: EngineRequest) -> Admission | None:
        """By the group that has most of the prompt in its prefix index, then by the one with most room, of those that
        have enough. Otherwise as `Engine.try_admit`."""
        for engine in self._engines:
            if request.request_id in engine:
                raise InputError("request_id", f"must be new, {request.request_id!r} is in use")
        for group in self._preferred(request.token_ids):
            admission = self._engines[group].try_admit(request)
            if admission is not None:
                return admission
        return None

    def _preferred(self, token_ids: Sequence[int]) -> list[int]:
        """Who has most room, where a page that is there already counts twice: it need not be taken, nor computed. More
        would send all prompts of one chat template after each other into one group."""
        if len(self._pools) == 1:
            return [0]
        hashes = page_hashes(token_ids[:-1], self._page_size, self._salt)

        def preference(group: int) -> tuple[int, int]:
            pages = self._pools[group]
            num_hits = len(pages.prefix.lookup(hashes))
            return pages.num_free_or_cached + 2 * num_hits, num_hits

        return sorted(range(len(self._pools)), key=preference, reverse=True)

    def abort(self, request_id: str) -> None:
        """Idempotent, as `Engine.abort` is."""
        for engine in self._engines:
            engine.abort(request_id)

    def group_of(self, request_id: str) -> int:
        """Of a request that was admitted and is not over, or whose lent pages are not back yet."""
        found = [group for group, engine in enumerate(self._engines) if request_id in engine]
        assert len(found) == 1, f"{request_id!r} is in groups {found}"
        return found[0]

    def engine_of(self, request_id: str) -> Engine:
        """The same."""
        return self._engines[self.group_of(request_id)]

    # ---- a step ------------------------------------------------------------------------------------------------

    def begin_step(self, now: float) -> GroupsStep | None:
        """None when no group can run anything."""
        steps = tuple(engine.begin_step(now) for engine in self._engines)
        return GroupsStep(steps) if any(step is not None for step in steps) else None

    def commit_step(self, step: GroupsStep, tokens: Sequence[Sequence[int]], now: float) -> None:
        for engine, own, drawn in zip(self._engines, step.steps, tokens, strict=True):
            if own is not None:
                engine.commit_step(own, drawn, now)

    def fail_step(self, step: GroupsStep, text: str) -> None:
        for engine, own in zip(self._engines, step.steps, strict=True):
            if own is not None:
                engine.fail_step(own, text)

    def drain_outputs(self) -> list[EngineOutput]:
        return [output for engine in self._engines for output in engine.drain_outputs()]

    # ---- state shows itself ------------------------------------------------------------------------------------

    @property
    def most_free_pages(self) -> int:
        """Of one group: a request fits into one."""
        return max(pages.num_free_or_cached for pages in self._pools)

    @property
    def prefill_speed(self) -> PrefillSpeed | None:
        """Of one group, on average: a prompt is computed in one. None: not measured yet."""
        speeds = [speed for engine in self._engines if (speed := engine.prefill_speed) is not None]
        if not speeds:
            return None
        return PrefillSpeed(
            step_s=sum(speed.step_s for speed in speeds) / len(speeds),
            rate=sum(speed.rate for speed in speeds) / len(speeds),
            chunk_tokens=max(speed.chunk_tokens for speed in speeds),
        )

    @property
    def decode_size(self) -> StepSize:
        """Of the group that runs most, for which the others wait."""
        return max((engine.decode_size for engine in self._engines), key=lambda size: (size.rows, size.keys))

    def statistics(self) -> EngineStatistics:
        """Of all groups together."""
        each = [engine.statistics() for engine in self._engines]
        names = [field.name for field in fields(EngineStatistics)]
        return EngineStatistics(**{name: sum(getattr(one, name) for one in each) for name in names})

    def check(self) -> None:
        for engine in self._engines:
            engine.check()

    def __repr__(self) -> str:
        return f"Groups({self._engines!r})"
