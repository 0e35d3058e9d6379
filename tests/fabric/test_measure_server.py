"""`headrace fabric serve`: who is let in, for how long, one at a time, and what is left when he goes."""

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from measured_links import open_files, serving, side_processes

from headrace.errors import FabricError, InputError
from headrace.fabric.limits import wire
from headrace.fabric.limits.frames import HEAD, read_frame, write_frame
from headrace.fabric.measure import questions as q
from headrace.fabric.measure.greeting import GREETING_BYTES, Hello, enter, hello, read_greeting
from headrace.fabric.measure.server import MAX_GREETINGS, MAX_LOOPS, Patience
from headrace.fabric.measure.session import Place, Session


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = open_files()
    yield
    assert side_processes(os.getpid()) == []
    assert open_files() <= before


def ask(stream: socket.socket, question: q.Question) -> q.Answer | None:
    write_frame(stream, q.encode(question), timeout_s=20)
    body = read_frame(stream, deadline=time.monotonic() + 20)
    return None if body is None else q.answers.decode(body)


def is_closed(stream: socket.socket, within_s: float = 10.0) -> bool:
    stream.settimeout(within_s)
    try:
        return stream.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


def eventually(enter_it: Callable[[], socket.socket]) -> socket.socket:
    """What has left may take a moment to be gone."""
    until = time.monotonic() + 10
    while True:
        try:
            return enter_it()
        except FabricError:
            assert time.monotonic() < until
            time.sleep(0.02)


def wait_for_room(place: Place) -> socket.socket:
    """A new session, as soon as the last one is over."""
    return eventually(Session(place).open_engine)


# ---- who is let in


def test_a_stranger_gets_no_process() -> None:
    with serving() as place:
        stranger = Session(Place(host=place.host, port=place.port, token="guessed"))
        with pytest.raises(InputError, match="token: must be the one"):
            stranger.open_engine()
        assert side_processes(os.getpid()) == []


def test_who_says_nothing_is_put_out() -> None:
    with serving(Patience(greeting_s=0.2)) as place, socket.create_connection((place.host, place.port)) as silent:
        assert len(silent.recv(GREETING_BYTES, socket.MSG_WAITALL)) == GREETING_BYTES
        silent.sendall(b"half")
        assert is_closed(silent)


def test_few_may_be_greeted_at_once_and_room_comes_back() -> None:
    with serving(Patience(greeting_s=0.5)) as place, ExitStack() as stack:
        where = place.host, place.port
        silent = [stack.enter_context(socket.create_connection(where)) for _ in range(MAX_GREETINGS)]
        for each in silent:
            each.recv(GREETING_BYTES, socket.MSG_WAITALL)
        with socket.create_connection(where) as one_more:
            assert is_closed(one_more)
        assert all(is_closed(each) for each in silent)
        wait_for_room(place).close()


def test_another_version_is_told_but_only_to_who_has_the_token() -> None:
    with serving() as place:
        for token, verdict in ((place.token, 2), ("guessed", 1)):
            with socket.create_connection((place.host, place.port)) as newer:
                nonce = read_greeting(newer.recv(GREETING_BYTES, socket.MSG_WAITALL))
                newer.sendall(hello(Hello(kind=1, session=bytes(16), version=9), nonce=nonce, token=token))
                assert newer.recv(1) == bytes([verdict])
                assert is_closed(newer)


# ---- one at a time


def test_a_second_client_is_told_that_it_is_busy_and_then_let_in() -> None:
    with serving() as place:
        with Session(place).open_engine() as first:
            assert isinstance(ask(first, q.Describe()), q.Described)
            with pytest.raises(FabricError, match="busy"):
                Session(place).open_engine()
            with pytest.raises(FabricError, match="busy"), Session(place).open_loop():
                pytest.fail("let in")
            assert isinstance(ask(first, q.Describe()), q.Described)
        with wait_for_room(place) as second:
            assert isinstance(ask(second, q.Describe()), q.Described)


def test_loops_belong_to_a_session_are_few_and_end_with_it() -> None:
    with serving() as place, ExitStack() as stack:
        session = Session(place)
        with pytest.raises(FabricError, match="refuses"), session.open_loop():
            pytest.fail("no session is open")
        with session.open_engine():
            loops = [stack.enter_context(session.open_loop()) for _ in range(MAX_LOOPS)]
            wire.tell(loops[0], wire.Listen(), timeout_s=10)
            assert isinstance(wire.next_answer(loops[0], deadline=time.monotonic() + 10), wire.Listening)
            with pytest.raises(FabricError, match="refuses"), session.open_loop():
                pytest.fail("one too many")
        assert all(is_closed(loop) for loop in loops)
        wait_for_room(place).close()


def test_a_loop_that_ends_makes_room_for_another() -> None:
    with serving() as place:
        session = Session(place)
        with session.open_engine():
            for _ in range(MAX_LOOPS + 1):
                with eventually(session.open_loop) as loop:
                    wire.tell(loop, wire.MakeMemory(num_bytes=4096), timeout_s=10)
                    assert wire.next_answer(loop, deadline=time.monotonic() + 10) == wire.Done()


@pytest.mark.parametrize("kind", [0, 3, 255])
def test_other_kinds_of_connections_are_refused(kind: int) -> None:
    with serving() as place, pytest.raises(FabricError, match="refuses"):
        enter(place.host, place.port, token=place.token, said=Hello(kind=kind, session=bytes(16)))


# ---- limits


def test_a_session_that_lasts_too_long_is_ended() -> None:
    with serving(Patience(session_s=0.5)) as place, Session(place).open_engine() as stream:
        assert is_closed(stream)
        wait_for_room(place).close()


@pytest.mark.parametrize(
    "question",
    [
        wire.MakeMemory(num_bytes=wire.MAX_MEMORY_BYTES + 1),
        q.Idle(ns=61 * 10**9),
        q.ReceivePages(num_pages=1 << 20),
        q.Ping(by="owner", num_rounds=10**7, pause_ns=0),
        q.Ping(by="owner", num_rounds=1, pause_ns=10**10),
        q.Fill(seed=-1),
        q.Open(transport="x" * 257),
        q.Join(descriptor=bytes(1000)),
        wire.Listen(),
    ],
)
def test_what_is_too_large_or_out_of_place_is_no_question(question: q.Question) -> None:
    with pytest.raises(ValueError, match=r"\$|Invalid value"):
        q.questions.decode(q.encode(question))


@pytest.mark.parametrize(
    "words",
    [HEAD.pack(2**32 - 1), HEAD.pack(4) + b"\xc1\xc1\xc1\xc1"],
    ids=["a length that no message has", "bytes that are no message"],
)
def test_what_is_no_question_ends_the_session(words: bytes) -> None:
    with serving() as place, Session(place).open_engine() as stream:
        stream.sendall(words)
        assert is_closed(stream)


def test_a_client_that_dies_in_the_middle_leaves_no_process() -> None:
    with serving() as place:
        session = Session(place)
        with session.open_engine() as engine, session.open_loop() as loop:
            wire.tell(loop, wire.MakeMemory(num_bytes=4096), timeout_s=10)
            wire.tell(loop, wire.Listen(), timeout_s=10)
            wire.tell(loop, wire.Pong(num_rounds=1), timeout_s=10)  # it waits for somebody to connect
            for _ in range(2):
                assert wire.next_answer(loop, deadline=time.monotonic() + 10) is not None
            assert len(side_processes(os.getpid())) == 2
            engine.close()
            assert is_closed(loop)
        wait_for_room(place).close()


def test_a_server_that_ends_takes_its_processes_along() -> None:
    with serving() as place:
        stream = Session(place).open_engine()
        assert isinstance(ask(stream, q.Describe()), q.Described)
    with stream:
        assert is_closed(stream)
