"""Page accounting: single rules by name, then random histories against a slow obvious model."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.errors import InputError
from headrace.kvcache.pages import PagePool
from headrace.kvcache.prefix import PrefixIndex


def pool_of(num_pages: int) -> PagePool:
    return PagePool(num_pages, PrefixIndex())


def allocate(pool: PagePool, num: int) -> list[int]:
    pages = pool.try_allocate(num)
    assert pages is not None
    return pages


def cached(pool: PagePool, *hashes: bytes) -> list[int]:
    """Pages indexed under `hashes` in one chain, released together."""
    pages = allocate(pool, len(hashes))
    for page, page_hash in zip(pages, hashes, strict=True):
        assert pool.try_index(page, page_hash)
    pool.release(pages)
    return pages


def test_a_fresh_pool_is_free() -> None:
    pool = pool_of(3)
    assert (pool.capacity, pool.num_free_or_cached) == (3, 3)
    assert repr(pool) == "PagePool(free=3, held=0, cached=0, quarantined=0, total=3)"
    assert sorted(allocate(pool, 3)) == [0, 1, 2]


def test_a_pool_without_pages_or_with_another_pools_index_is_refused() -> None:
    with pytest.raises(InputError, match="num_pages: must be at least 1, is 0"):
        pool_of(0)
    index = PrefixIndex()
    index.try_insert(0, b"a")
    with pytest.raises(InputError, match="prefix: must be empty"):
        PagePool(1, index)


def test_without_room_nothing_is_taken_and_nothing_evicted() -> None:
    pool = pool_of(3)
    cached(pool, b"a")
    allocate(pool, 1)
    assert pool.try_allocate(3) is None
    assert pool.prefix.lookup([b"a"])
    assert pool.statistics().num_free == 1
    pool.check()


def test_free_pages_are_taken_before_cached_ones() -> None:
    pool = pool_of(3)
    kept = cached(pool, b"a")
    assert not set(allocate(pool, 2)) & set(kept)
    assert pool.prefix.lookup([b"a"]) == kept
    assert allocate(pool, 1) == kept
    assert pool.prefix.lookup([b"a"]) == []
    assert pool.statistics().num_evicted == 1
    pool.check()


def test_the_least_recently_released_chain_is_evicted_first_and_from_its_end() -> None:
    pool = pool_of(4)
    old = cached(pool, b"a", b"b")
    young = cached(pool, b"c", b"d")
    assert allocate(pool, 1) == [old[1]]
    assert pool.prefix.lookup([b"a", b"b"]) == [old[0]]
    assert allocate(pool, 2) == [old[0], young[1]]


def test_a_hit_makes_a_chain_young_again() -> None:
    pool = pool_of(2)
    first, second = cached(pool, b"a"), cached(pool, b"b")
    pool.pin(first)
    pool.release(first)
    assert allocate(pool, 1) == second


def test_a_pinned_page_is_never_evicted() -> None:
    pool = pool_of(2)
    hit = cached(pool, b"a")
    pool.pin(hit)
    assert pool.try_allocate(2) is None
    assert pool.prefix.lookup([b"a"]) == hit


def test_a_shared_page_is_kept_until_its_last_holder_releases_it() -> None:
    pool = pool_of(1)
    pages = allocate(pool, 1)
    pool.pin(pages)
    pool.release(pages)
    assert pool.statistics().num_held == 1
    pool.release(pages)
    assert pool.statistics().num_free == 1


def test_a_private_duplicate_is_freed_where_the_indexed_page_is_cached() -> None:
    pool = pool_of(2)
    one, two = allocate(pool, 2)
    assert pool.try_index(one, b"a")
    assert not pool.try_index(two, b"a")
    pool.release([one, two])
    statistics = pool.statistics()
    assert (statistics.num_cached, statistics.num_free, statistics.num_indexed) == (1, 1, 1)


def test_a_page_forgotten_while_held_is_freed() -> None:
    pool = pool_of(1)
    pages = allocate(pool, 1)
    pool.try_index(pages[0], b"a")
    pool.prefix.forget(pages[0])
    pool.release(pages)
    assert pool.statistics().num_free == 1
    pool.check()


def test_quarantined_pages_are_missing_from_the_capacity_until_readmitted() -> None:
    pool = pool_of(3)
    pages = allocate(pool, 2)
    pool.quarantine(pages)
    assert (pool.capacity, pool.num_free_or_cached, pool.statistics().num_quarantined) == (1, 1, 2)
    assert pool.try_allocate(2) is None
    pool.check()
    pool.readmit(pages)
    assert (pool.capacity, pool.num_free_or_cached) == (3, 3)
    pool.check()


def test_nothing_of_nothing_is_fine() -> None:
    pool = pool_of(1)
    for act in (pool.pin, pool.release, pool.quarantine, pool.readmit):
        act([])
    assert pool.try_allocate(0) == []


Misuse = Callable[[PagePool], object]


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        pytest.param(lambda pool: pool.release([0, 3]), "page 3 is not held", id="a free page is released"),
        pytest.param(lambda pool: pool.release([0, 2]), "page 2 is not held", id="a cached page is released"),
        pytest.param(lambda pool: pool.release([0, 0]), "named twice", id="a page is released twice at once"),
        pytest.param(lambda pool: pool.release([0, 9]), "page 9 is not held", id="a page of another pool is released"),
        pytest.param(lambda pool: pool.pin([2, 3]), "page 3 is neither held nor cached", id="a free page is pinned"),
        pytest.param(lambda pool: pool.pin([2, 4]), "page 4 is neither", id="a quarantined page is pinned"),
        pytest.param(lambda pool: pool.pin([2, 2]), "named twice", id="a page is pinned twice at once"),
        pytest.param(lambda pool: pool.quarantine([5, 0]), "page 0 is held 2 times", id="a shared page in quarantine"),
        pytest.param(lambda pool: pool.quarantine([5, 1]), "page 1 is indexed", id="an indexed page in quarantine"),
        pytest.param(lambda pool: pool.quarantine([5, 4]), "page 4 is not held", id="a page quarantined twice"),
        pytest.param(lambda pool: pool.quarantine([5, 5]), "named twice", id="a page quarantined twice at once"),
        pytest.param(lambda pool: pool.require_private([5, 0]), "page 0 is held 2 times", id="a shared one as private"),
        pytest.param(lambda pool: pool.require_private([1]), "page 1 is indexed", id="an indexed one as private"),
        pytest.param(lambda pool: pool.require_private([3]), "page 3 is not held", id="a free one as private"),
        pytest.param(lambda pool: pool.require_private([5, 5]), "named twice", id="one as private twice"),
        pytest.param(lambda pool: pool.readmit([4, 5]), "page 5 is not quarantined", id="a held page is readmitted"),
        pytest.param(lambda pool: pool.readmit([4, 4]), "named twice", id="a page is readmitted twice at once"),
        pytest.param(lambda pool: pool.try_index(3, b"z"), "page 3 is not held", id="a free page is indexed"),
        pytest.param(lambda pool: pool.try_index(2, b"z"), "page 2 is not held", id="a cached page is indexed"),
        pytest.param(lambda pool: pool.try_index(1, b"z"), "under another hash", id="a page with two hashes"),
        pytest.param(lambda pool: pool.try_allocate(-1), "cannot allocate -1", id="a negative count"),
    ],
)
def test_misuse_raises_and_changes_nothing(misuse: Misuse, message: str) -> None:
    pool = pool_of(6)  # 0: held twice, 1: held and indexed, 2: cached, 3: free, 4: quarantined, 5: held once
    assert allocate(pool, 6) == [0, 1, 2, 3, 4, 5]
    pool.pin([0])
    pool.try_index(1, b"one")
    pool.try_index(2, b"two")
    pool.release([2, 3])
    pool.quarantine([4])
    before = pool.statistics()
    with pytest.raises(AssertionError, match=message):
        misuse(pool)
    assert pool.statistics() == before
    pool.require_private([5])  # which it is, and stays
    pool.check()
    pool.release([0, 1, 5])
    pool.release([0])
    pool.readmit([4])
    assert pool.num_free_or_cached == 6


@pytest.mark.parametrize(
    "act", [pytest.param(lambda prefix: prefix.forget(0), id="forgotten behind the pool's back"),
            pytest.param(lambda prefix: prefix.try_insert(1, b"z"), id="a free page inserted")]
)  # fmt: skip
def test_check_finds_an_index_that_disagrees(act: Callable[[PrefixIndex], object]) -> None:
    pool = pool_of(2)
    cached(pool, b"a")
    act(pool.prefix)
    with pytest.raises(AssertionError, match=r"indexed but|not indexed"):
        pool.check()


@pytest.mark.parametrize("table", ["_free", "_cached", "_quarantined"])
def test_check_finds_a_lost_page_and_a_doubled_one(table: str) -> None:
    def pool_with_all_states() -> PagePool:
        pool = pool_of(4)
        pages = allocate(pool, 3)
        pool.try_index(pages[0], b"a")
        pool.release(pages[:1])
        pool.quarantine(pages[1:2])
        return pool

    lost, doubled = pool_with_all_states(), pool_with_all_states()
    getattr(lost, table).__class__.pop(getattr(lost, table), *([0] if table == "_cached" else []))
    doubled._refcounts[next(iter(getattr(doubled, table)))] = 1
    for pool in (lost, doubled):
        with pytest.raises(AssertionError, match=r"free \+ held"):
            pool.check()


@dataclass(slots=True)
class ModelPage:
    """One page as a newcomer would note it down."""

    state: str = "free"
    refcount: int = 0
    page_hash: bytes | None = None
    released_at: int = 0


class PagesAgainstModel(RuleBasedStateMachine):
    """A list of records, searched for everything, beside the pool."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = pool_of(7)
        self.model = [ModelPage() for _ in range(7)]
        self.now = 0

    def in_state(self, *states: str) -> list[int]:
        return [page for page, record in enumerate(self.model) if record.state in states]

    def some(self, data: st.DataObject, pages: list[int]) -> list[int]:
        return data.draw(st.lists(st.sampled_from(pages), unique=True, max_size=4) if pages else st.just([]))

    @rule(num=st.integers(0, 8))
    def allocate(self, num: int) -> None:
        free = self.in_state("free")
        by_age = sorted(self.in_state("cached"), key=lambda page: self.model[page].released_at)
        pages = self.pool.try_allocate(num)
        if num > len(free) + len(by_age):
            assert pages is None
            return
        assert pages is not None
        assert len(set(pages)) == num
        num_evicted = max(0, num - len(free))
        assert set(pages[: num - num_evicted]) <= set(free)
        assert pages[num - num_evicted :] == by_age[:num_evicted]
        for page in pages:
            self.model[page] = ModelPage(state="held", refcount=1)

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        pages = self.some(data, self.in_state("held", "cached"))
        self.pool.pin(pages)
        for page in pages:
            self.model[page].state = "held"
            self.model[page].refcount += 1

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages = self.some(data, self.in_state("held"))
        self.pool.release(pages)
        for page in reversed(pages):
            record = self.model[page]
            record.refcount -= 1
            if record.refcount == 0:
                self.now += 1
                record.state = "free" if record.page_hash is None else "cached"
                record.released_at = self.now

    @precondition(lambda self: self.in_state("held"))
    @rule(data=st.data(), page_hash=st.binary(min_size=1, max_size=1).map(lambda b: bytes([b[0] % 6])))
    def index(self, data: st.DataObject, page_hash: bytes) -> None:
        page = data.draw(st.sampled_from(self.in_state("held")))
        holders = [other for other, record in enumerate(self.model) if record.page_hash == page_hash]
        if self.model[page].page_hash not in (None, page_hash):
            if not holders:
                with pytest.raises(AssertionError):
                    self.pool.try_index(page, page_hash)
            return
        assert self.pool.try_index(page, page_hash) == (holders in ([], [page]))
        if not holders:
            self.model[page].page_hash = page_hash

    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        private = [p for p in self.in_state("held") if self.model[p].refcount == 1 and self.model[p].page_hash is None]
        pages = self.some(data, private)
        self.pool.quarantine(pages)
        for page in pages:
            self.model[page] = ModelPage(state="quarantined")

    @rule(data=st.data())
    def readmit(self, data: st.DataObject) -> None:
        pages = self.some(data, self.in_state("quarantined"))
        self.pool.readmit(pages)
        for page in pages:
            self.model[page] = ModelPage()

    @rule(verb=st.sampled_from(["pin", "release", "quarantine", "readmit"]), page=st.integers(0, 7))
    def misuse(self, verb: str, page: int) -> None:
        record = self.model[page] if page < 7 else ModelPage(state="elsewhere")
        allowed = {
            "pin": record.state in ("held", "cached"),
            "release": record.state == "held",
            "quarantine": record.state == "held" and record.refcount == 1 and record.page_hash is None,
            "readmit": record.state == "quarantined",
        }
        if not allowed[verb]:
            with pytest.raises(AssertionError):
                getattr(self.pool, verb)([page])

    @invariant()
    def agree(self) -> None:
        self.pool.check()
        statistics = self.pool.statistics()
        assert statistics.num_free == len(self.in_state("free"))
        assert statistics.num_held == len(self.in_state("held"))
        assert statistics.num_cached == len(self.in_state("cached"))
        assert statistics.num_quarantined == len(self.in_state("quarantined"))
        assert statistics.num_indexed == sum(record.page_hash is not None for record in self.model)
        assert self.pool.num_free_or_cached == statistics.num_free + statistics.num_cached
        assert self.pool.capacity == 7 - statistics.num_quarantined
        for page, record in enumerate(self.model):
            assert self.pool.prefix.hash_of(page) == record.page_hash
            assert record.page_hash is None or self.pool.prefix.lookup([record.page_hash]) == [page]


TestPagesAgainstModel = PagesAgainstModel.TestCase
TestPagesAgainstModel.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
