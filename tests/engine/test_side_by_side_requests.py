"""Requests beside each other: whatever becomes of one, what others have of it stays as it was, and nobody's finished
transfer waits in somebody else's queue."""

from collections.abc import Callable

import pytest
from scripted_model import World, make_request

SHARED = [7, 3, 11, 42, 5, 19, 23, 2]  # two pages
ONE, OTHER = [*SHARED, 31, 8], [*SHARED, 77, 1, 9, 30, 4]


def fails_to_be_fetched(world: World) -> None:
    """Half of it has landed, in pages that are nobody's then; it is computed here."""
    lent = world.fetch(make_request("other", OTHER, 9))
    world.step()
    world.pool.quarantine(lent)
    world.engine.fetch_failed("other")
    world.model.spoil(lent)
    world.engine.wait_for_room("other")
    world.step()
    world.pool.readmit(lent)


def gives_way(world: World) -> None:
    """Preempted, and computed again beside the one that stayed."""
    world.start(make_request("other", OTHER, 9))
    for number in range(2):
        world.start(make_request(f"more {number}", [50 + number, 60, 61], 20))


Fate = Callable[[World], None]


@pytest.mark.parametrize("fate", [fails_to_be_fetched, gives_way], ids=lambda fate: fate.__name__)
def test_one_that_is_recomputed_disturbs_nobody_who_shares_its_prefix(fate: Fate) -> None:
    world = World(num_pages=12 if fate is gives_way else 24)
    world.make_outputs_short()
    one = make_request("one", ONE, 16)
    world.start(one)
    while not world.answers.get("one") or not world.answers["one"].tokens:
        world.step()
    shared = [page for page in range(world.pool.num_pages) if page in world.pool.prefix]
    assert shared, "nothing to share"
    fate(world)
    world.run()
    world.expect_text(one)
    world.expect_text(make_request("other", OTHER, 9))
    world.expect_empty()
    if fate is gives_way:
        assert world.engine.statistics().num_preemptions > 0


def test_what_was_fetched_decodes_though_others_wait_in_front_of_it() -> None:
    """One waits for pages, which the fetched one has; the prompt of another takes every step's chunk."""
    world = World(num_pages=18, chunk_tokens=4)
    fetched = make_request("fetched", list(range(10, 22)), 3, tier="flex")
    lent = world.fetch(fetched)
    waits = make_request("waits", list(range(30, 39)), 8)
    lost = world.fetch(waits)
    long = make_request("long", list(range(40, 64)), 8)
    world.start(long)
    world.pool.quarantine(lost)
    world.engine.fetch_failed("waits")
    world.engine.wait_for_room("waits")
    world.step()
    assert world.engine.statistics().num_waiting == 1, "there is room for it"
    world.land(fetched, lent, 0)
    for _ in range(3):
        world.step()
    world.expect_text(fetched)
    assert world.engine.statistics().num_prefilling == 1, "the long prompt was never in front of it"
    world.pool.readmit(lost)
    world.run()
    for request in (waits, long):
        world.expect_text(request)
    world.expect_empty()
