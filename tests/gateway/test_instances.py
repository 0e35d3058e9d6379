"""The table of instances, with a clock that is moved."""

from dataclasses import replace

import msgspec
import pytest
from scripted_instance import LIMITS, MODEL, announce, status

from headrace.gateway.dispatch.instances import (
    Came,
    Drains,
    Instances,
    Left,
    Stranger,
    TurnedAway,
    decoder_view,
    prefiller_view,
)
from headrace.gateway.options import Timings
from headrace.gateway.route import DecoderView, PrefillerView
from headrace.protocol.control import CONTROL_VERSION, Decoding, Goodbye, Limits, NoRoom, Role

P1, P2, D1, D2 = ("1" * 32, "2" * 32, "d" * 32, "e" * 32)
TIMINGS = Timings(silence_s=2.0, forget_s=100.0)


def table() -> Instances:
    return Instances(MODEL, TIMINGS)


def here(instances: Instances, *who: tuple[Role, str], now: float = 0.0) -> None:
    for role, uuid in who:
        (came,) = instances.take(announce(role, uuid), now)
        assert isinstance(came, Came)


def decoders(instances: Instances) -> list[DecoderView]:
    return [decoder_view(instance) for instance in instances.open_decoders()]


def prefillers(instances: Instances) -> list[PrefillerView]:
    return [prefiller_view(instance) for instance in instances.open_prefillers()]


def told(changes: list[object]) -> list[tuple[str, str]]:
    """Kinds and reasons."""
    return [(type(change).__name__, getattr(change, "reason", "")) for change in changes]


def test_an_instance_that_announces_itself_is_here_and_again_is_no_news() -> None:
    instances = table()
    here(instances, ("prefiller", P1), ("decoder", D1))
    assert instances.take(announce("prefiller", P1), 1.0) == []
    assert [view.uuid for view in prefillers(instances)] == [P1]
    assert [view.uuid for view in decoders(instances)] == [D1]


def test_colocated_instances_are_decoders() -> None:
    instances = table()
    here(instances, ("colocated", D1))
    assert prefillers(instances) == []
    assert [view.is_colocated for view in decoders(instances)] == [True]


def test_a_changed_announcement_is_a_new_instance() -> None:
    instances = table()
    here(instances, ("decoder", D1))
    changed = msgspec.structs.replace(announce("decoder", D1), name="renamed")
    assert told(instances.take(changed, 1.0)) == [("Left", "it announces itself anew"), ("Came", "")]
    assert instances.name(D1) == "renamed"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"version": CONTROL_VERSION + 1},
            f"control version differs: ours {CONTROL_VERSION}, theirs {CONTROL_VERSION + 1}",
        ),
        ({"model": "other"}, "model differs: ours 'tiny', theirs 'other'"),
        ({"fingerprint": "g"}, "model fingerprint differs: ours 'f', theirs 'g'"),
    ],
)
def test_one_that_differs_is_turned_away_and_told_of_once(changes: dict[str, object], reason: str) -> None:
    instances = table()
    here(instances, ("decoder", D1))
    other = announce("decoder", D2, **changes)
    assert told(instances.take(other, 0.0)) == [("TurnedAway", reason)]
    assert instances.take(other, 0.5) == [] and instances.take(status(D2), 1.0) == []
    assert instances.get(D2) is None and len(decoders(instances)) == 1


def test_one_that_was_turned_away_is_let_in_when_those_from_whom_it_differs_have_left() -> None:
    instances = table()
    here(instances, ("decoder", D1))
    instances.take(announce("decoder", D2, fingerprint="g"), 0.0)
    instances.take(Goodbye(sender=D1), 1.0)
    assert told(instances.take(status(D2), 1.5)) == [("Came", "")]


def test_silence_ends_it_and_any_word_brings_it_back() -> None:
    instances = table()
    here(instances, ("decoder", D1), ("decoder", D2))
    instances.expire(0.0)
    for now in (1.0, 1.9):
        instances.take(status(D1), now)
        assert instances.expire(now) == []
    (left,) = instances.expire(2.1)
    assert isinstance(left, Left) and left.instance.uuid == D2 and left.reason == "silent for 2 s"
    assert instances.expire(2.2) == []
    assert told(instances.take(NoRoom(sender=D2, request_id="r", num_free_pages=0), 3.0)) == [("Came", "")]


def test_a_pause_of_our_own_is_nobodys_silence() -> None:
    instances = table()
    here(instances, ("decoder", D1))
    instances.expire(0.5)
    assert instances.expire(60.0) == []  # stopped meanwhile: what it said is still in the socket
    assert instances.expire(61.0) == []
    assert told(instances.expire(61.9)) == [("Left", "silent for 2 s")]


def test_goodbye_forgets_it() -> None:
    instances = table()
    here(instances, ("decoder", D1))
    assert told(instances.take(Goodbye(sender=D1), 1.0)) == [("Left", "it said goodbye")]
    assert instances.take(Goodbye(sender=D1), 1.0) == []
    assert instances.take(status(D1), 1.1) == [Stranger(D1)]


def test_a_stranger_is_asked_who_it_is_when_it_says_how_it_stands() -> None:
    instances = table()
    assert instances.take(status(D1), 0.0) == [Stranger(D1)]
    assert instances.take(NoRoom(sender=D1, request_id="r", num_free_pages=0), 0.0) == []


def test_a_thousand_that_came_and_went_leave_nothing() -> None:
    instances = table()
    for nth in range(1000):
        instances.take(announce("decoder", f"{nth:032x}"), nth / 10)
        instances.expire(nth / 10)
    for now in range(100, 204):
        instances.expire(float(now))
    assert repr(instances) == "Instances(0 alive, 0 absent or refused)"


def test_what_was_given_counts_until_the_next_status() -> None:
    instances = table()
    here(instances, ("decoder", D1), ("prefiller", P1))
    instances.take(status(D1, num_free_pages=20, num_running=2), 0.0)
    instances.placed(D1, 5)
    instances.given(P1, 300, "interactive")
    (decoder,), (prefiller,) = decoders(instances), prefillers(instances)
    assert (decoder.num_free_pages, decoder.num_running, prefiller.num_queued_tokens) == (15, 3, 300)
    instances.ended(D1, 5)
    instances.ended(D1, 5)  # one that was in its last Status
    (decoder,) = decoders(instances)
    assert (decoder.num_free_pages, decoder.num_running) == (25, 1)
    instances.take(status(D1, num_free_pages=64, num_running=0), 0.5)
    instances.take(status(P1, num_queued_tokens=7), 0.5)
    instances.ended(D1, 5)
    (decoder,), (prefiller,) = decoders(instances), prefillers(instances)
    assert (decoder.num_free_pages, decoder.num_running, prefiller.num_queued_tokens) == (64, 0, 7)


def test_what_was_given_counts_in_its_tier_and_in_the_pace() -> None:
    instances = table()
    here(instances, ("decoder", D1), ("prefiller", P1))
    load = Decoding(step_s=0.01, row_s=0.001, key_s=0.0, num_rows=2, num_keys=100, num_interactive=0)
    instances.take(status(D1, num_running=2, num_queued_tokens=50, num_background_tokens=40, decoding=load), 0.0)
    instances.take(status(P1, num_queued_tokens=500, num_background_tokens=400), 0.0)
    instances.placed(D1, 5)
    instances.given(P1, 300, "flex")
    instances.given(P1, 20, "interactive")
    (decoder,), (prefiller,) = decoders(instances), prefillers(instances)
    assert (decoder.num_queued_tokens, decoder.num_background_tokens) == (50, 40)
    assert decoder.decoding == msgspec.structs.replace(load, num_rows=3, num_keys=180)
    assert (prefiller.num_queued_tokens, prefiller.num_background_tokens) == (820, 700)


def test_before_its_first_status_everything_is_free() -> None:
    instances = table()
    here(instances, ("decoder", D1))
    (decoder,) = decoders(instances)
    assert (decoder.num_free_pages, decoder.num_running) == (64, 0)


def test_what_is_said_of_the_absent_is_ignored() -> None:
    instances = table()
    instances.placed(D1, 5)
    instances.ended(D1, 5)
    instances.given(P1, 5, "flex")
    assert instances.leave(D1, "gone") == [] and instances.name(D1) == "-" and instances.name(None) == "-"


def test_limits_are_those_of_the_decoder_that_holds_the_least() -> None:
    instances = table()
    assert instances.limits() is None
    small = Limits(max_model_len=4096, pool_tokens=320, page_size=16, max_running=4)
    tiny = Limits(max_model_len=16, pool_tokens=16, page_size=16, max_running=1)
    instances.take(announce("decoder", D1), 0.0)
    instances.take(announce("decoder", D2, limits=small), 0.0)
    instances.take(announce("prefiller", P1, limits=tiny), 0.0)
    assert instances.limits() == small
    instances.take(Goodbye(sender=D2), 0.0)
    assert instances.limits() == LIMITS


def test_the_first_to_come_says_which_weights_are_served() -> None:
    instances = Instances(MODEL, replace(TIMINGS))
    instances.take(announce("decoder", D1, fingerprint="g"), 0.0)
    (turned,) = instances.take(announce("prefiller", P2), 0.0)
    assert isinstance(turned, TurnedAway)


def test_one_that_drains_is_here_and_is_given_nothing_until_it_leaves() -> None:
    instances = table()
    here(instances, ("decoder", D1), ("prefiller", P1))
    (drains,) = instances.take(status(D1, is_draining=True), 1.0)
    assert isinstance(drains, Drains) and drains.instance.uuid == D1
    assert instances.take(status(D1, is_draining=True), 1.5) == []
    instances.take(status(P1, is_draining=True), 1.5)
    assert decoders(instances) == [] and prefillers(instances) == [] and instances.limits() is None
    assert {instance.uuid for instance in instances.alive()} == {D1, P1}
    assert told(instances.take(Goodbye(sender=D1), 2.0)) == [("Left", "it said goodbye")]


def test_one_that_drains_and_is_silent_for_a_while_is_given_nothing_when_it_is_back() -> None:
    instances = table()
    here(instances, ("decoder", D1))
    instances.take(status(D1, is_draining=True), 0.0)
    instances.expire(0.0)
    for now in (0.9, 1.8, 2.7):
        instances.expire(now)
    assert instances.get(D1) is None
    assert told(instances.take(status(D1, is_draining=True), 3.0)) == [("Came", "")]
    assert decoders(instances) == [] and instances.get(D1) is not None
