"""A simulated prefiller: leases, its queue, steps of chunks, and what each of them sends. The real one's rules:
`messenger.leases`, `engine.schedule.plan_chunks`, `messenger.plan.PromptPages`.

    lease --Prefill--> queued, its pages taken --steps--> computed --the last byte arrives--> its decoder is told
                                                                    pages released
"""

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.engine.cost import StepSize
from headrace.engine.requests import Tier
from headrace.engine.schedule import Chunk, Prefilling, plan_chunks, rank, size_beside
from headrace.messenger.leases import Leases
from headrace.messenger.plan import PromptPages
from headrace.planner.clock import Clock
from headrace.planner.links import Sent, Way, send
from headrace.planner.outcome import Did
from headrace.planner.pages import Held, Pages
from headrace.planner.requests import Request
from headrace.planner.scenario import Instance, KvModel, LinkModel


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """One prompt at one prefiller. `landed_at`: the last byte of what was sent so far. `hit_len`: what the prefiller
    had of the prompt. `on_landed` is called when all of it is at its decoder."""

    request: Request
    attempt: int
    lease: str
    travels: PromptPages
    way_in: Way
    link: LinkModel
    on_landed: Callable[["Job"], None]
    order: int = 0
    hit_len: int = 0
    computed: int = 0
    held: Held = field(default_factory=dict)
    num_private: int = 0
    landed_at: float = 0.0
    is_dropped: bool = False

    @property
    def tier(self) -> Tier:
        return self.request.tier

    def as_prefilling(self) -> Prefilling["Job"]:
        return Prefilling(
            key=self, tier=self.tier, order=self.order, computed=self.computed, end=self.travels.num_prefilled
        )


def by_rank(job: Job) -> tuple[int, int]:
    return rank(job.tier, job.order)


class Prefiller:
    """`on_room`: what was leased is computed, or pages are free."""

    def __init__(self, spec: Instance, kv: KvModel, clock: Clock, on_room: Callable[[], None]) -> None:
        self.spec = spec
        self.pages = Pages(spec.num_pages, spec.page_size)
        self.way_out = Way()
        self.busy_s = 0.0
        self.num_steps = 0
        self.num_computed = 0
        self.is_down = False
        self._kv = kv
        self._clock = clock
        self._on_room = on_room
        self._queue: list[Job] = []
        self._without_pages: list[Job] = []  # refused for want of room, and asked again
        self._open: dict[Job, None] = {}
        self._num_jobs = 0
        self._num_asked = 0
        self._lives = 0
        self._step: tuple[list[Chunk[Job]], float] | None = None
        self.leases = self._no_leases()
        self.speed = spec.measured.prefill_speed(StepSize(), chunk_tokens=spec.chunk_tokens, bound_s=None)

    def _no_leases(self) -> Leases:
        return Leases(capacity_tokens=2 * self.spec.chunk_tokens, reserve_tokens=self.spec.chunk_tokens)

    # ---- coming in ---------------------------------------------------------------------------------------------

    def try_lease(self, request: Request) -> str | None:
        if self.is_down:
            return None
        self._num_asked += 1
        name = f"{request.index}.{self._num_asked}"
        return self.leases.try_grant(name, num_tokens=request.num_known - 1, tier=request.tier, now=self._clock.now)

    def add(self, job: Job) -> None:
        """Its Prefill comes."""
        job.order, self._num_jobs = self._num_jobs, self._num_jobs + 1
        self._open[job] = None
        self._without_pages.append(job)
        self._take_in()
        self._begin()

    def _take_in(self) -> None:
        """Those whose pages are there, nobody overtakes."""
        while self._without_pages and self._try_take(self._without_pages[0]):
            self._without_pages.pop(0)

    def _try_take(self, job: Job) -> bool:
        prefix, pages = job.request.prefix, self.pages
        num_pages = job.travels.end
        hit = pages.hit_tokens(prefix, job.travels.num_tokens)
        num_hit = hit // pages.page_size
        if num_pages - pages.num_held_of(prefix) > pages.num_available:
            return False
        job.held = pages.pin(prefix)
        job.num_private = num_pages - num_hit
        pages.take(job.num_private)
        job.hit_len = job.computed = hit
        self.leases.computed(job.lease, hit)
        present = len(job.travels.present(hit))
        if present:
            self._send([(job, present)], self._clock.now, 0.0)
        if hit == job.travels.num_prefilled:
            if job.request.begun_at is None:
                job.request.begun_at = self._clock.now
            self._finish(job)
        else:
            insort(self._queue, job, key=by_rank)
        return True

    def drop(self, job: Job) -> None:
        """Its decoder is gone: a chunk that runs is computed in vain. Nothing where it is not here any more."""
        if job not in self._open:
            return
        job.is_dropped = True
        self.leases.end(job.lease)
        if job in self._queue:
            self._queue.remove(job)
        if job in self._without_pages:
            self._without_pages.remove(job)
        if self._step is None or all(chunk.key is not job for chunk in self._step[0]):
            self._release(job)

    # ---- a step ------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._step is not None or not self._queue:
            return
        chunks = plan_chunks(_enough(self._queue, self.spec.chunk_tokens), self.spec.chunk_tokens)
        took_s = self.spec.steps.step_s(size_beside(StepSize(), chunks))
        now = self._clock.now
        for chunk in chunks:
            if chunk.key.request.begun_at is None:
                chunk.key.request.begun_at = now
        completed = [(chunk.key, len(chunk.key.travels.completed_by(chunk.begin, chunk.end))) for chunk in chunks]
        self._send([(job, num) for job, num in completed if num], now, took_s)
        self._step = chunks, now
        self._clock.at(now + took_s, self._commit, self._lives)

    def _send(self, pages: list[tuple[Job, int]], begun: float, took_s: float) -> None:
        sent = [
            Sent(
                way_in=job.way_in,
                link=job.link,
                num_bytes=num * self._kv.page_bytes,
                num_messages=num * self._kv.page_messages,
            )
            for job, num in pages
        ]
        if sent:
            arrived = send(self.way_out, sent, begun, took_s, self._kv.num_layers)
            for (job, _), at in zip(pages, arrived, strict=True):
                job.landed_at = max(job.landed_at, at)

    def _commit(self, life: int) -> None:
        if life != self._lives:
            return
        assert self._step is not None
        (chunks, begun), self._step = self._step, None
        self.busy_s += self._clock.now - begun
        self.num_steps += 1
        for chunk in chunks:
            job = chunk.key
            self.num_computed += chunk.end - chunk.begin
            if job.is_dropped:
                self._release(job)
                continue
            job.computed = chunk.end
            self.leases.computed(job.lease, chunk.end - chunk.begin)
            if chunk.end == job.travels.num_prefilled:
                self._queue.remove(job)
                self._finish(job)
        self._begin()
        self._on_room()

    def _finish(self, job: Job) -> None:
        held = self.pages.index(job.request.prefix, job.held)
        job.num_private -= sum(held.values()) - sum(job.held.values())
        job.held = held
        if job.request.computed_at is None:
            job.request.computed_at = self._clock.now
        self._clock.at(job.landed_at, self._landed, (self._lives, job))

    def _landed(self, given: tuple[int, Job]) -> None:
        life, job = given
        if life != self._lives or job.is_dropped:
            return
        self._release(job)
        job.on_landed(job)
        self._take_in()
        self._begin()

    def _release(self, job: Job) -> None:
        del self._open[job]
        self.pages.release(job.held, job.num_private)

    # ---- failing -----------------------------------------------------------------------------------------------

    def die(self) -> list[Job]:
        """-> whose prompts are lost."""
        lost = [job for job in self._open if not job.is_dropped]
        self.is_down = True
        self._lives += 1
        self._step = None
        self._queue.clear()
        self._without_pages.clear()
        self._open.clear()
        self.pages.clear()
        self.leases = self._no_leases()
        return lost

    def revive(self) -> None:
        self.is_down = False

    # ---- how it stands -----------------------------------------------------------------------------------------

    def num_before(self, tier: Tier) -> int:
        """Tokens that are computed before a prompt of this tier."""
        background = self.leases.outstanding_of("flex")
        urgent = self.leases.outstanding_of("interactive")
        return urgent + (min(background, self.spec.chunk_tokens) if tier == "interactive" else background)

    def cached_tokens(self, request: Request) -> int:
        return self.pages.hit_tokens(request.prefix, request.num_known)

    def did(self) -> Did:
        return Did(
            name=self.spec.name,
            role=self.spec.role,
            busy_s=self.busy_s,
            num_steps=self.num_steps,
            num_prefill_tokens=self.num_computed,
            num_preemptions=0,
            num_evicted=self.pages.num_evicted,
            way_bytes=self.way_out.num_bytes,
            way_busy_s=self.way_out.busy_s,
        )


def _enough(queue: list[Job], num_tokens: int) -> list[Prefilling[Job]]:
    """The first of them, as many as a step of so many tokens can have."""
    found = []
    for job in queue:
        found.append(job.as_prefilling())
        num_tokens -= job.travels.num_prefilled - job.computed
        if num_tokens <= 0:
            break
    return found
