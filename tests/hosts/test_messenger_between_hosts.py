"""A ticket from a prefiller on one host to a decoder on another: over 1 Gbit/s, and over a link that goes down."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from line_process import LineProcess
from two_hosts import TwoHosts

pytestmark = pytest.mark.hosts

OUTAGE_S = 10.0
MESSENGER_TESTS = str(Path(__file__).resolve().parent.parent / "messenger")


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    prefiller: LineProcess
    decoder: LineProcess

    def open(self, request_id: str, num_tokens: int) -> None:
        lease = self.prefiller.ask("lease", request_id=request_id, num_tokens=num_tokens)["lease"]
        self.decoder.ask("open", request_id=request_id, num_tokens=num_tokens, lease=lease)

    def answer_of(self, request_id: str, *, seconds: float = 30.0) -> Any:
        return self.decoder.ask("answer_of", request_id=request_id, seconds=seconds)

    def is_served(self, request_id: str) -> None:
        """Ready, with the right bytes; then given back."""
        answer = self.answer_of(request_id)
        assert answer is not None and answer["kind"] == "ready", answer
        assert self.decoder.ask("largest_difference", request_id=request_id) < 1e-3
        self.decoder.ask("finish", request_id=request_id)

    def everything_is_back(self) -> dict[str, Any]:
        settled = self.decoder.ask("settled")
        assert (settled["num_open"], settled["num_held"], settled["num_quarantined"]) == (0, 0, 0), settled
        assert settled["num_free"] + settled["num_cached"] == settled["num_pages"]
        assert settled["num_wrong_bytes"] == 0
        return settled  # type: ignore[no-any-return]


@contextmanager
def roles(hosts: TwoHosts) -> Iterator[Roles]:
    """A prefiller on host a and a decoder on host b that have met."""
    with ExitStack() as ending:
        prefiller, decoder = (
            ending.enter_context(host.python("messenger_on_host.py", role, host.address, path=[MESSENGER_TESTS]))
            for host, role in zip(hosts.both, ("prefiller", "decoder"), strict=True)
        )
        decoder.ask("meet", prefiller=prefiller.greeting["address"])
        yield Roles(prefiller=prefiller, decoder=decoder)


def cut(pair: Roles, request_id: str, down: Callable[[], object]) -> None:
    """A ticket of which some bytes have come and most have not: a layer takes its time, and then the link goes down."""
    pair.prefiller.ask("faults", layer_s=0.05)
    pair.open(request_id, 120)
    assert pair.decoder.ask("has_begun", request_id=request_id)
    down()


def test_tickets_are_served_over_one_gigabit_and_again_after_ten_seconds_without_a_link(linked: TwoHosts) -> None:
    """The one that the link went down under fails as soon as heartbeats are missed, not when its deadline comes."""
    linked.limit("1gbit")
    with roles(linked) as pair:
        pair.open("long", 1000)
        pair.is_served("long")
        cut(pair, "cut", lambda: linked.a.set_link("down"))
        answer = pair.answer_of("cut", seconds=OUTAGE_S / 2)
        assert answer is not None, "heartbeats were missed"
        assert (answer["kind"], answer["reason"]) == ("failed", "peer_lost")
        pair.decoder.ask("finish", request_id="cut")
        pair.decoder.ask("wait", seconds=OUTAGE_S)
        assert pair.everything_is_back()["num_revokes"] == 1
        pair.prefiller.ask("faults")
        linked.a.set_link("up")
        assert pair.decoder.ask("wait_ready", seconds=30.0), "greeted anew, with nobody's help"
        pair.open("next", 500)
        pair.is_served("next")
        assert pair.everything_is_back()["num_ready"] == 2
        prefiller = pair.prefiller.ask("statistics")
        assert (prefiller["num_tickets"], prefiller["num_held_pages"]) == (0, 0)


def test_a_ticket_cancelled_while_the_link_is_down_ends_in_a_revoke_and_nothing_of_it_lands_later(
    hosts: TwoHosts,
) -> None:
    relay = hosts.join_by_relay(delay_s=0.005)
    with roles(hosts) as pair:
        cut(pair, "cut", lambda: relay.ask("stop"))
        pair.decoder.ask("cancel", request_id="cut")
        answer = pair.answer_of("cut")
        assert (answer["kind"], answer["reason"]) == ("failed", "cancelled")
        pair.decoder.ask("finish", request_id="cut")
        pair.decoder.ask("wait", seconds=5.0)  # twice the patience with a cancel that nobody answers
        assert pair.everything_is_back()["num_revokes"] == 1
        pair.prefiller.ask("faults")
        relay.ask("go")
        pair.decoder.ask("wait", seconds=2.0)
        pair.everything_is_back()  # the free pages are still poison
        assert pair.decoder.ask("wait_ready", seconds=30.0), "greeted anew, with nobody's help"
        pair.open("next", 500)
        pair.is_served("next")
        pair.everything_is_back()
