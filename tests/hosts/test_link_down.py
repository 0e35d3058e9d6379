"""The fabric over tcp while the link between two hosts is down: nothing wrong lands, nothing hangs, and every transfer
has one end."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from host_endpoint import MIB
from host_sites import WHOLE, Sent, Site, close_both, connect, endpoints, say, send
from two_hosts import TwoHosts

pytestmark = pytest.mark.hosts

OUTAGE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    down: Callable[[], object]
    up: Callable[[], object]


def veth_down_at_the_writer(hosts: TwoHosts) -> Link:
    """Its kernel knows at once: there is no way to the other host."""
    hosts.join()
    hosts.limit("200mbit")
    return Link(down=lambda: hosts.a.set_link("down"), up=lambda: hosts.a.set_link("up"))


def relay_that_stops(hosts: TwoHosts) -> Link:
    """Nobody knows: packets just do not arrive."""
    relay = hosts.join_by_relay(delay_s=0.001)
    return Link(down=lambda: relay.ask("stop"), up=lambda: relay.ask("go"))


def begin(a: Site, b: Site) -> Sent:
    """A large transfer of which some pages have arrived, and most have not."""
    send(a, b, 8).is_right()
    before = b.ask("statistics")["num_arrivals"]
    sent = send(a, b)
    while b.ask("statistics")["num_arrivals"] < before + 50:
        pass
    return sent


def works_again(a: Site, b: Site) -> None:
    """With nothing done but this, on the same peers. Where the writer's kernel gave up the connection and the reader's
    knows nothing of it, the provider accepts no second one of that peer until the reader's kernel has asked."""
    connect(a, b)
    send(a, b, 200).is_right(seconds=30.0)
    send(b, a, 200).is_right()
    say(a, b, MIB)


@pytest.mark.parametrize("join", [veth_down_at_the_writer, relay_that_stops])
def test_a_transfer_outlives_ten_seconds_without_a_link_or_is_told_failed(
    hosts: TwoHosts, join: Callable[[TwoHosts], Link]
) -> None:
    link = join(hosts)
    with endpoints(hosts) as (a, b):
        sent = begin(a, b)
        link.down()
        time.sleep(OUTAGE_S)
        assert sent.wrong_bytes()["foreign"] == 0
        arrivals = b.ask("statistics")["num_arrivals"]
        assert arrivals < 8 + WHOLE, "it was cut in the middle"
        link.up()
        done = sent.done(seconds=40.0)
        if done["complete"]:
            sent.is_right()
        else:
            assert done["num_failed"] > 0 and done["code"] > 0 and done["text"]
            assert sent.wrong_bytes()["foreign"] == 0
        works_again(a, b)
        close_both(a, b)


def test_a_connection_that_the_kernel_gives_up_is_told_once_and_the_peer_works_again(hosts: TwoHosts) -> None:
    """Four repetitions, some six seconds, where fifteen are usual: the outage is longer than the kernel's patience."""
    link = veth_down_at_the_writer(hosts)
    for host in hosts.both:
        host.set_kernel("ipv4/tcp_retries2", 4)
    with endpoints(hosts) as (a, b):
        sent = begin(a, b)
        link.down()
        done = sent.done(seconds=OUTAGE_S)
        assert not done["complete"]
        assert 0 < done["num_failed"] <= done["num_posted"] < WHOLE
        # It gives up two connections at nearly the same time; the first one says why.
        assert done["code"] > 0 and ("fi_" in done["text"] or done["text"].startswith("control connection: ")), done
        link.up()
        assert sent.wrong_bytes()["foreign"] == 0
        works_again(a, b)
        assert a.ask("statistics")["num_transfers_now"] == 0
        close_both(a, b)


def test_nothing_that_the_link_held_back_lands_after_a_revoke(hosts: TwoHosts) -> None:
    link = relay_that_stops(hosts)
    with endpoints(hosts) as (a, b):
        sent = begin(a, b)
        link.down()
        assert b.ask("revoke", to=a.name)
        b.ask("poison")
        time.sleep(2.0)
        link.up()
        done = sent.done(seconds=30.0)
        assert not done["complete"] and done["code"] > 0 and done["text"]
        empty = sent.wrong_bytes()
        assert empty["foreign"] == 0 and empty["missing"] > 0.99 * sent.num_bytes
        works_again(a, b)
        close_both(a, b)


def test_endpoints_end_in_time_while_the_link_is_down(hosts: TwoHosts) -> None:
    link = relay_that_stops(hosts)
    with endpoints(hosts) as (a, b):
        sent = begin(a, b)
        link.down()
        a.ask("remove", to=b.name)
        done = sent.done(seconds=5.0)
        assert not done["complete"] and done["code"] > 0 and done["text"]
        close_both(a, b)
