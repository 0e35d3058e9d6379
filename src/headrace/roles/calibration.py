"""What steps cost here, found out before the first request: an instance that has budgets runs a few steps of its own.

Owns nothing: the steps write into pages that are taken for them and given back, and what they took goes to the engine's
MeasuredCost. It warms the kernels up as well. Runs on the role's loop, before the instance announces itself; the steps
are computed where all are, on the model thread.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from headrace.engine.cost import StepCost, StepSize
from headrace.engine.measured_cost import MeasuredCost
from headrace.engine.requests import SamplingParams
from headrace.engine.schedule import MIN_CHUNK
from headrace.engine.step import Draw, StepRow
from headrace.kvcache.layout import num_pages_for
from headrace.kvcache.pages import PagePool
from headrace.model.batch import Row
from headrace.roles.instance import Instance
from headrace.roles.options import InstanceOptions

PATIENCE_S = 3.0
"""After this no further trial begins: those that tell most come first, and real steps tell the rest."""
ROUNDS = 3

SHALLOW, DEEP = 32, 1024  # keys
SMALL_CHUNK, CHUNK = 16, 64  # tokens
MANY_ROWS = 8

GREEDY = SamplingParams()

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One step: decode rows that read `num_keys` each, and positions [begin, end) of a prompt."""

    num_rows: int = 0
    num_keys: int = 0
    begin: int = 0
    end: int = 0

    @property
    def size(self) -> StepSize:
        size = StepSize(rows=self.num_rows, keys=self.num_rows * self.num_keys)
        return size.with_chunk(self.begin, self.end)


def has_budget(options: InstanceOptions) -> bool:
    return options.tpot_s is not None or options.max_stall_s is not None


async def calibrate(instance: Instance, costs: MeasuredCost, *, clock: Callable[[], float] = time.monotonic) -> None:
    """Some seconds at most. The pool is as before, but for bytes of pages that were free."""
    options = instance.options
    num_tables, table_tokens = plan_tables(
        num_pages=instance.pools[0].num_free_or_cached,
        page_size=options.page_size,
        max_model_len=instance.max_model_len,
        max_running=options.max_running,
    )
    trials = plan_trials(num_rows=num_tables - 1, table_tokens=table_tokens, chunk_tokens=options.chunk_tokens)
    table_pages = num_pages_for(table_tokens, options.page_size)
    scratch = [_scratch(pool, num_tables * table_pages) for pool in instance.pools]

    async def compute(trial: Trial) -> None:
        """The same in every group."""
        await instance.compute([list(_rows(trial, _tables(pages, table_pages))) for pages in scratch])

    try:
        began_at = clock()
        await compute(trials[0])  # the first step of a process tells of its start
        for trial in trials * ROUNDS:
            step_began_at = clock()
            if step_began_at - began_at > PATIENCE_S:
                break
            await compute(trial)
            costs.learn(trial.size, clock() - step_began_at)
    finally:
        for pool, pages in zip(instance.pools, scratch, strict=True):
            pool.release(pages)
    costs.fit()
    assert costs.cost is not None
    tell_budgets(options, costs.cost)


def _scratch(pool: PagePool, num_pages: int) -> Sequence[int]:
    pages = pool.try_allocate(num_pages)
    assert pages is not None, f"no scratch pages: {pool!r}"
    return pages


def _tables(pages: Sequence[int], table_pages: int) -> list[Sequence[int]]:
    return [pages[at : at + table_pages] for at in range(0, len(pages), table_pages)]


def plan_tables(*, num_pages: int, page_size: int, max_model_len: int, max_running: int) -> tuple[int, int]:
    """-> how many page tables there are, one for each row and one for a prompt, and how many tokens each holds. A
    pool has two pages at least."""
    num_tables = min(MANY_ROWS + 1, max_running + 1, num_pages)
    return num_tables, min(DEEP, max_model_len, num_pages // num_tables * page_size)


def plan_trials(*, num_rows: int, table_tokens: int, chunk_tokens: int) -> list[Trial]:
    """Of each kind of work some, and what both kinds together take; those first that tell most."""
    shallow = min(SHALLOW, table_tokens)
    chunk = min(CHUNK, chunk_tokens, table_tokens)
    trials = (
        Trial(num_rows=1, num_keys=shallow),
        Trial(end=chunk),
        Trial(num_rows=num_rows, num_keys=shallow),
        Trial(num_rows=num_rows, num_keys=shallow, end=chunk),
        Trial(end=min(SMALL_CHUNK, chunk)),
        Trial(num_rows=num_rows, num_keys=table_tokens),
        Trial(begin=table_tokens - chunk, end=table_tokens),
        Trial(end=min(chunk_tokens, table_tokens)),
    )
    return list(dict.fromkeys(trials))


def _rows(trial: Trial, tables: Sequence[Sequence[int]]) -> Iterator[StepRow]:
    for table in tables[: trial.num_rows]:
        row = Row(token_ids=(0,), begin=trial.num_keys - 1, page_table=table, wants_logits=True)
        yield StepRow(row=row, draw=Draw(sampling=GREEDY, position=trial.num_keys))
    if trial.end:
        token_ids = (0,) * (trial.end - trial.begin)
        yield StepRow(
            row=Row(token_ids=token_ids, begin=trial.begin, page_table=tables[-1], wants_logits=False), draw=None
        )


def tell_budgets(options: InstanceOptions, cost: StepCost) -> None:
    """For the log: what steps take, what the budgets hold of that, and which of them cannot be kept."""
    alone = StepSize().with_row(DEEP)
    _log.info("a step takes %s; one row alone %.1f ms, with %d keys", cost, cost.predict(alone) * 1e3, DEEP)
    if options.tpot_s is not None:
        most = cost.largest_batch(keys_each=DEEP, budget_s=options.tpot_s, most=options.max_running)
        _log.info("a TPOT of %g ms is kept with up to %d rows of %d keys", options.tpot_s * 1e3, most, DEEP)
        _warn("TPOT", options.tpot_s, "one row alone", cost.predict(alone))
    if options.max_stall_s is not None:
        budget_s, most = options.max_stall_s, options.chunk_tokens
        tokens = cost.largest_chunk(alone, begin=DEEP, budget_s=budget_s, most=most)
        _log.info("a stall of %g ms holds chunks of %d tokens beside one row", budget_s * 1e3, tokens)
        _warn("stall", budget_s, "one row beside the least chunk", cost.predict(alone.with_chunk(0, MIN_CHUNK)))


def _warn(name: str, budget_s: float, what: str, least_s: float) -> None:
    if least_s > budget_s:
        _log.warning("a %s of %g ms cannot be kept: %s takes %.1f ms", name, budget_s * 1e3, what, least_s * 1e3)
