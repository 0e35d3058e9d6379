"""The fabric over tcp between two hosts: over a plain link, and over ones with a rate, with loss and with delay."""

from collections.abc import Callable
from statistics import median

import pytest
from host_endpoint import MIB, SRC_STRIDE
from host_sites import WHOLE, close_both, counts_agree, endpoints, say, send
from two_hosts import TwoHosts

pytestmark = pytest.mark.hosts


def test_pages_messages_and_counts_agree_between_two_hosts(linked: TwoHosts) -> None:
    with endpoints(linked) as (a, b):
        both = [send(a, b), send(b, a)]
        for sent in both:
            sent.is_right()
        odd = [send(a, b, 300, length=4097), send(b, a, 1, length=SRC_STRIDE - 1)]
        for sent in odd:
            sent.is_right()
        for num_bytes in (1, 3 * MIB + 1):
            say(a, b, num_bytes)
            say(b, a, num_bytes + 1)
        for writer, reader in ((a, b), (b, a)):
            of_this = [sent for sent in both + odd if sent.writer is writer]
            counts_agree(
                writer, reader, sum(sent.num_pages for sent in of_this), sum(sent.num_bytes for sent in of_this)
            )
        close_both(a, b)


def test_two_hosts_take_the_transport_that_needs_no_common_memory(linked: TwoHosts) -> None:
    """They share a kernel and even their pids, as containers of one machine do, but not the network."""
    with endpoints(linked, "mapped", "tcp") as (a, b):
        assert a.ask("transport", to=b.name).startswith("tcp")
        assert b.ask("transport", to=a.name).startswith("tcp")
        send(a, b, 100).is_right()
        say(b, a, 100)


def test_a_transfer_keeps_to_the_rate_of_its_link_and_uses_it(linked: TwoHosts) -> None:
    linked.limit("1gbit")
    with endpoints(linked) as (a, b):
        send(a, b, 1).is_right()  # connected
        sent = send(a, b)
        took = sent.is_right()
        gbps = sent.num_bytes * 8 / took / 1e9
        assert 0.5 < gbps < 1.0, f"{gbps:.3f} Gbit/s"
        counts_agree(a, b, 1 + WHOLE, SRC_STRIDE + sent.num_bytes)


def test_every_byte_arrives_though_one_packet_in_a_hundred_is_lost(linked: TwoHosts) -> None:
    linked.lose(0.01)
    with endpoints(linked) as (a, b):
        both = [send(a, b), send(b, a)]
        for sent in both:
            sent.is_right(seconds=50.0)
        say(a, b, 2 * MIB)
        say(b, a, 2 * MIB)
        counts_agree(a, b, WHOLE, both[0].num_bytes)
        counts_agree(b, a, WHOLE, both[1].num_bytes)
        # 64 MiB each way are 46,000 packets: some 900 lost, had each its own draw
        assert 300 < linked.num_lost() < 3000


def delayed_by_netem(hosts: TwoHosts) -> None:
    hosts.join()
    hosts.delay(0.005)


def delayed_by_relay(hosts: TwoHosts) -> None:
    hosts.join_by_relay(delay_s=0.005)


def delayed_and_lossy(hosts: TwoHosts) -> None:
    hosts.join_by_relay(delay_s=0.005, loss=0.01, seed=1)


@pytest.mark.parametrize("join", [delayed_by_netem, delayed_by_relay, delayed_and_lossy])
def test_transfers_and_messages_cross_a_link_with_a_delay(hosts: TwoHosts, join: Callable[[TwoHosts], None]) -> None:
    join(hosts)
    with endpoints(hosts) as (a, b):
        b.process.tell("echo", to=a.name, num_messages=20)
        round_trips = a.ask("round_trips", to=b.name, num_messages=20)
        b.process.answer()
        assert min(round_trips) >= 0.010
        assert median(round_trips) < 0.100, "the delay is the link's, not ours"
        both = [send(a, b, 96), send(b, a, 96)]
        for sent in both:
            assert sent.is_right(seconds=50.0) >= 0.005
        say(a, b, MIB)
        say(b, a, MIB)
        counts_agree(a, b, 96, both[0].num_bytes)
        counts_agree(b, a, 96, both[1].num_bytes)
