"""Connections of another process: cut, darkened and slowed from outside, with a process of ours as the other."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from headrace.cli.chaos.sockets import SO_MAX_PACING_RATE, connections_between, cut, darkened, slowed

ECHO = """
import socket, sys
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
connection, _ = listener.accept()
while data := connection.recv(1 << 16):
    connection.sendall(data)
"""
QUICK_S = 0.3


@dataclass(frozen=True)
class Echo:
    """A process that sends back what it gets, and our end of the connection."""

    pid: int
    end: socket.socket

    def answers(self, data: bytes = b"x") -> bool:
        self.end.settimeout(QUICK_S)
        self.end.sendall(data)
        return self.heard(len(data))

    def heard(self, number: int) -> bool:
        try:
            while number > 0 and (came := self.end.recv(number)):
                number -= len(came)
        except TimeoutError:
            return False
        return number == 0


@pytest.fixture
def echo() -> Iterator[Echo]:
    process = subprocess.Popen([sys.executable, "-S", "-c", ECHO], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process, socket.create_connection(("127.0.0.1", int(process.stdout.readline()))) as end:
        own = Echo(process.pid, end)
        assert own.answers()
        yield own
        process.kill()


def test_a_cut_connection_is_over_for_both(echo: Echo) -> None:
    with connections_between(echo.pid, os.getpid()) as ends:
        assert cut(ends) == 1
    assert echo.end.recv(1) == b""


def test_a_connection_to_somebody_else_is_none_of_theirs(echo: Echo) -> None:
    with connections_between(echo.pid, 1) as ends:
        assert ends == []


def test_what_is_sent_into_the_dark_arrives_when_it_is_light(echo: Echo) -> None:
    with connections_between(echo.pid, os.getpid()) as ends, darkened(ends):
        assert not echo.answers(b"abc")
    echo.end.settimeout(5.0)
    assert echo.heard(3)


def test_a_slowed_connection_takes_its_time_and_is_free_again_afterwards(echo: Echo) -> None:
    data = bytes(300_000)
    assert all(echo.answers() for _ in range(12)), "the kernel paces no connection's first ten segments"
    with connections_between(echo.pid, os.getpid()) as ends, slowed(ends, 400_000):
        began = time.monotonic()
        echo.end.settimeout(10.0)
        echo.end.sendall(data)
        assert echo.heard(len(data))
        assert time.monotonic() - began > QUICK_S
    with connections_between(echo.pid, os.getpid()) as ends:
        assert [end.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE) for end in ends] == [-1]
