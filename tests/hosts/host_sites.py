"""Endpoints on two hosts as a test sees them, and transfers between them. Knows nothing of links."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from host_endpoint import MIB, SRC_STRIDE
from line_process import LineProcess
from two_hosts import Host, TwoHosts

WHOLE = 64 * MIB // SRC_STRIDE  # pages of a large transfer
NOTHING_WRONG = {"missing": 0, "foreign": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One endpoint of the two, and where it is."""

    host: Host
    process: LineProcess

    @property
    def name(self) -> str:
        return str(self.process.greeting["address"])

    def ask(self, do: str, **arguments: object) -> Any:
        return self.process.ask(do, **arguments)


@contextmanager
def endpoints(hosts: TwoHosts, *transports: str) -> Iterator[tuple[Site, Site]]:
    """One on each host, connected both ways; over tcp unless others are named."""
    with ExitStack() as ending:
        a, b = (
            Site(
                host=host,
                process=ending.enter_context(host.python("host_endpoint.py", host.address, *(transports or ("tcp",)))),
            )
            for host in hosts.both
        )
        connect(a, b)
        connect(b, a)
        yield a, b


def connect(writer: Site, reader: Site) -> None:
    descriptor = reader.ask("grant", to=writer.name)
    writer.ask("connect", to=reader.name, descriptor=descriptor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A transfer under way; `length` bytes of each page."""

    writer: Site
    reader: Site
    imm: int
    num_pages: int
    length: int
    transfer: int
    at_ns: int

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.length

    def done(self, seconds: float = 20.0) -> dict[str, Any]:
        done = self.writer.ask("done", transfer=self.transfer, seconds=seconds)
        assert done is not None, f"never told: {self.writer.ask('statistics')}"
        assert self.writer.ask("num_told", transfer=self.transfer) == 1
        return done  # type: ignore[no-any-return]

    def arrived_s(self, seconds: float = 20.0) -> float:
        """Seconds from its beginning to the last arrival: one clock for both hosts."""
        reached = self.reader.ask("reached", imm=self.imm, seconds=seconds)
        assert reached is not None, f"never arrived: {self.reader.ask('statistics')}"
        assert reached["arrivals"] == self.num_pages
        return (reached["at_ns"] - self.at_ns) / 1e9  # type: ignore[no-any-return]

    def wrong_bytes(self) -> dict[str, int]:
        return self.reader.ask(  # type: ignore[no-any-return]
            "wrong_bytes", sender=self.writer.host.address, imm=self.imm, num_pages=self.num_pages, length=self.length
        )

    def is_right(self, seconds: float = 20.0) -> float:
        """Done, arrived, and every byte of the inbox as it should be. -> the seconds it took."""
        took = self.arrived_s(seconds)
        done = self.done()
        assert (done["num_posted"], done["num_failed"], done["complete"], done["code"]) == (self.num_pages, 0, True, 0)
        assert self.wrong_bytes() == NOTHING_WRONG
        return took


IMMS = iter(range(1, 1 << 12))


def send(writer: Site, reader: Site, num_pages: int = WHOLE, *, length: int = SRC_STRIDE) -> Sent:
    """Scattered pages into a clean inbox; nothing is waited for."""
    imm = next(IMMS)
    reader.ask("poison")
    reader.ask("arm", imm=imm, expected=num_pages)
    begun = writer.ask("write", to=reader.name, imm=imm, num_pages=num_pages, length=length)
    return Sent(writer=writer, reader=reader, imm=imm, num_pages=num_pages, length=length, **begun)


def say(sender: Site, hearer: Site, num_bytes: int) -> None:
    """A message that is waited for."""
    digest = sender.ask("send", to=hearer.name, num_bytes=num_bytes, seed=num_bytes)
    assert hearer.ask("message") == digest


def counts_agree(writer: Site, reader: Site, num_pages: int, num_bytes: int) -> None:
    end = time.monotonic() + 5.0
    while True:  # a message may be heard before its sender knows that it was sent
        wrote, came = writer.ask("statistics"), reader.ask("statistics")
        if wrote["num_messages_sent"] == came["num_messages_received"]:
            break
        assert time.monotonic() < end, (wrote, came)
    posted = (wrote["num_writes_posted"], wrote["num_writes_completed"], wrote["num_bytes_posted"])
    assert posted == (num_pages, num_pages, num_bytes)
    assert (wrote["num_writes_failed"], wrote["num_transfers_now"]) == (0, 0)
    assert (came["num_arrivals"], came["num_surplus"]) == (num_pages, 0)


def close_both(*sites: Site) -> None:
    assert max(site.ask("close") for site in sites) < 5.0
