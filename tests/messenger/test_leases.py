"""Leases: how much may be outstanding, who waits, and every way in which a lease ends."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import InputError
from headrace.messenger.leases import UNUSED_LEASE_S, Leases
from headrace.protocol.messages import Tier

CAPACITY, RESERVE = 64, 16


def leases() -> Leases:
    return Leases(capacity_tokens=CAPACITY, reserve_tokens=RESERVE)


def grant(of: Leases, name: str, num_tokens: int, tier: Tier = "interactive", now: float = 0.0) -> str:
    lease = of.try_grant(name, num_tokens=num_tokens, tier=tier, now=now)
    assert lease is not None, f"{name} must wait: {of!r}"
    return lease


def use(of: Leases, lease: str, name: str, num_tokens: int) -> Tier | None:
    return of.use(lease, name, num_tokens=num_tokens)


def waits(of: Leases, name: str, num_tokens: int, tier: Tier = "interactive") -> bool:
    return of.try_grant(name, num_tokens=num_tokens, tier=tier, now=0.0) is None


def test_two_steps_of_work_are_granted_and_then_requests_wait() -> None:
    of = leases()
    grant(of, "a", 40)
    grant(of, "b", 24)
    assert waits(of, "c", 17)
    assert of.outstanding_tokens == CAPACITY


def test_the_reserve_is_kept_from_background_prompts_and_given_to_interactive_ones() -> None:
    of = leases()
    grant(of, "background", CAPACITY - RESERVE, "flex")
    assert waits(of, "more background", 1, "flex")
    grant(of, "user", RESERVE)
    assert waits(of, "second user", 1)


def test_what_is_leased_is_told_by_tier() -> None:
    leases = Leases(capacity_tokens=100, reserve_tokens=50)
    leases.try_grant("flex", num_tokens=30, tier="flex", now=0.0)
    leases.try_grant("interactive", num_tokens=20, tier="interactive", now=0.0)
    assert (leases.outstanding_of("interactive"), leases.outstanding_of("flex")) == (20, 30)


def test_interactive_prompts_may_use_everything() -> None:
    of = leases()
    grant(of, "a", CAPACITY)
    assert waits(of, "b", 1)
    assert waits(of, "c", 1, "flex")


@pytest.mark.parametrize("tier", ["interactive", "flex"])
def test_a_prompt_longer_than_the_capacity_runs_when_nothing_of_its_tier_is_outstanding(tier: Tier) -> None:
    of = leases()
    small = grant(of, "small", 4, tier)
    assert waits(of, "long", 1000, tier)
    of.end(small)
    grant(of, "long", 1000, tier)
    assert waits(of, "second long", 1000, tier)


def test_a_long_interactive_prompt_does_not_wait_for_background_work() -> None:
    of = leases()
    grant(of, "background", 40, "flex")
    grant(of, "long", 1000)


def test_a_long_background_prompt_waits_for_everything() -> None:
    of = leases()
    lease = grant(of, "user", 4)
    assert waits(of, "long", 1000, "flex")
    of.end(lease)
    grant(of, "long", 1000, "flex")
    grant(of, "user again", RESERVE)  # which it does not shut out
    assert waits(of, "third user", 1)


def test_what_is_computed_makes_room_and_the_last_chunk_ends_the_lease() -> None:
    of = leases()
    lease = grant(of, "a", CAPACITY)
    assert use(of, lease, "a", CAPACITY)
    of.computed(lease, 24)
    assert of.outstanding_tokens == 40
    grant(of, "b", 24)
    of.computed(lease, 40)
    assert of.outstanding_tokens == 24
    of.computed(lease, 1)  # over already
    assert of.outstanding_tokens == 24


def test_a_repeated_reserve_gets_its_old_lease_and_counts_once() -> None:
    of = leases()
    assert grant(of, "a", 40) == grant(of, "a", 40)
    assert of.outstanding_tokens == 40


def test_a_request_that_comes_back_for_a_new_ticket_gets_a_lease_that_can_be_used() -> None:
    of = leases()
    first = grant(of, "a", 20)
    assert use(of, first, "a", 20)
    second = grant(of, "a", 20)
    assert second != first
    assert use(of, second, "a", 20)


def test_a_lease_is_used_once_and_only_by_its_own_request() -> None:
    of = leases()
    lease = grant(of, "a", 8)
    assert not use(of, "unknown", "a", 8)
    assert not use(of, lease, "b", 8)
    assert of.is_unused(lease, "a")
    assert use(of, lease, "a", 8)
    assert not of.is_unused(lease, "a")
    assert not use(of, lease, "a", 8)


@pytest.mark.parametrize("tier", ["interactive", "flex"])
def test_a_used_lease_says_its_tier(tier: Tier) -> None:
    of = leases()
    assert use(of, grant(of, "a", 8, tier), "a", 8) == tier


def test_a_lease_is_good_for_as_many_tokens_as_it_has_and_still_unused_after_it_was_too_small() -> None:
    of = leases()
    lease = grant(of, "a", 8)
    assert use(of, lease, "a", 9) is None
    assert of.is_unused(lease, "a")
    assert of.next_expiry() == UNUSED_LEASE_S
    assert use(of, lease, "a", 8) == "interactive"
    assert of.outstanding_tokens == 8


def test_a_lease_larger_than_its_prompt_is_good_and_holds_what_was_granted_until_it_ends() -> None:
    of = leases()
    lease = grant(of, "a", 14)
    assert use(of, lease, "a", 13)
    assert of.outstanding_tokens == 14
    of.computed(lease, 13)
    assert of.outstanding_tokens == 1
    of.end(lease)
    assert of.outstanding_tokens == 0


def test_an_ended_lease_is_unknown_and_ending_is_idempotent() -> None:
    of = leases()
    lease = grant(of, "a", 8)
    of.end(lease)
    of.end(lease)
    assert not use(of, lease, "a", 8)
    assert of.outstanding_tokens == 0


def test_a_lease_without_a_prefill_ends_after_two_seconds_and_a_used_one_does_not() -> None:
    of = leases()
    used, unused = grant(of, "a", 8, now=10.0), grant(of, "b", 8, now=10.5)
    assert of.next_expiry() == 10.0 + UNUSED_LEASE_S == 12.0
    assert use(of, used, "a", 8)
    assert of.next_expiry() == 12.5
    of.expire(12.49)
    assert of.outstanding_tokens == 16
    of.expire(12.5)
    assert of.outstanding_tokens == 8
    assert not use(of, unused, "b", 8)
    assert of.next_expiry() is None


def test_a_name_is_never_given_twice() -> None:
    of = leases()
    names = set()
    for i in range(50):
        names.add(grant(of, f"r{i}", 8, now=float(i)))
        of.expire(i + 2.0)
    assert len(names) == 50


@pytest.mark.parametrize(("capacity", "reserve"), [(0, 0), (16, 16), (16, 17), (16, -1)])
def test_a_reserve_that_leaves_nothing_or_is_negative_is_refused(capacity: int, reserve: int) -> None:
    with pytest.raises(InputError) as refusal:
        Leases(capacity_tokens=capacity, reserve_tokens=reserve)
    assert refusal.value.field == "reserve_tokens"


Move = tuple[str, int, str]
acts = st.sampled_from(["grant", "grant", "compute", "end", "tick"])
moves = st.lists(st.tuples(acts, st.integers(1, 30), st.sampled_from(["interactive", "flex"])), max_size=60)
SHARE = {"interactive": RESERVE, "flex": CAPACITY - RESERVE}
"""What each tier can always have when the other keeps to its own."""


@given(moves, st.booleans())
@settings(max_examples=150)
def test_outstanding_tokens_stay_within_the_capacity_but_for_one_long_prompt_of_each_tier(
    moves: list[Move], long_ones: bool
) -> None:
    of, open_now, now = leases(), dict[str, tuple[str, int, int]](), 0.0  # name: tier, tokens left, tokens at first
    for i, (what, number, tier) in enumerate(moves):
        name = sorted(open_now)[number % len(open_now)] if open_now else None
        if what == "grant":
            tokens = 1 + number * 37 % (100 if long_ones else SHARE[tier])
            lease = of.try_grant(f"r{i}", num_tokens=tokens, tier=tier, now=now)  # type: ignore[arg-type]
            if lease is not None:
                assert use(of, lease, f"r{i}", tokens) == tier
                open_now[lease] = (tier, tokens, tokens)
            else:
                assert open_now, "it waits for nothing"
        elif what == "compute" and name is not None:
            of.computed(name, number)
            tier_of, left, first = open_now.pop(name)
            if left > number:
                open_now[name] = (tier_of, left - number, first)
        elif what == "end" and name is not None:
            of.end(name)
            del open_now[name]
        elif what == "tick":
            now += number
            of.expire(now)
        assert of.outstanding_tokens == sum(left for _, left, _ in open_now.values())
        excess = {
            each: max((left for t, left, first in open_now.values() if t == each and first > SHARE[each]), default=0)
            for each in SHARE
        }
        allowed = CAPACITY + (sum(excess.values()) if long_ones else 0)
        assert of.outstanding_tokens <= allowed, f"{of!r}: {open_now}"
