"""Who gives way when pages run out: `engine.schedule` is asked, with page tables that are made up for it. Pure."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import chain

from headrace.engine.schedule import Decoding, Snapshot, schedule
from headrace.planner.pages import Name
from headrace.planner.requests import Request


@dataclass(frozen=True, slots=True)
class GivingWay:
    """`preempt` give all their pages back; whoever else is not among `stay` stands still."""

    preempt: tuple[Request, ...]
    stay: frozenset[Request]


def who_gives_way(
    rows: Sequence[Request],
    others: Collection[Request],
    *,
    num_available: int,
    page_size: int,
    kv_len: Callable[[Request], int],
    num_pages: Callable[[Request], int],
) -> GivingWay:
    """Of the `rows` of the next step; `others` hold pages too."""
    tables = _tables([*rows, *others], num_pages)
    snapshot = Snapshot(
        decoding=[
            Decoding(key=row, tier=row.tier, order=row.order, kv_len=kv_len(row), pages=table)
            for row, table in zip(rows, tables, strict=False)
        ],
        prefilling=(),
        other_tables=tables[len(rows) :],
        other_keys=0,  # who enters is not asked
        first_in_line=None,
        num_available=num_available,
        page_size=page_size,
    )
    plan = schedule(snapshot, chunk_tokens=1)
    return GivingWay((), frozenset()) if plan is None else GivingWay(plan.preempt, frozenset(plan.rows))


def _tables(requests: Sequence[Request], num_pages: Callable[[Request], int]) -> list[Sequence[int]]:
    """The same page ids for what they share."""
    most: dict[Name, int] = {}
    for name, num in chain.from_iterable(request.held.items() for request in requests):
        most[name] = max(most.get(name, 0), num)
    num_ids = 0
    shared: dict[Name, range] = {}
    for name, num in most.items():
        shared[name] = range(num_ids, num_ids + num)
        num_ids += num
    tables: list[Sequence[int]] = []
    for request in requests:
        parts = [shared[name][:num] for name, num in request.held.items()]
        private = range(num_ids, num_ids + num_pages(request) - sum(map(len, parts)))
        num_ids = private.stop
        tables.append(list(chain(*parts, private)) if parts else private)
    return tables
