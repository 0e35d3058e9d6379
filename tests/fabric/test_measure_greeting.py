"""How another machine is entered: proofs of the token, and what a client says of whoever answers."""

import errno
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from headrace.errors import FabricError, HandshakeRefused, InputError
from headrace.fabric.measure import greeting
from headrace.fabric.measure.greeting import (
    GREETING_BYTES,
    HELLO_BYTES,
    SESSION_BYTES,
    VERSION,
    Hello,
    Kind,
    Verdict,
    enter,
    hello,
    new_nonce,
    new_token,
    read_greeting,
    read_hello,
)

SAID = Hello(kind=Kind.ENGINE, session=bytes(range(SESSION_BYTES)))
NONCE = new_nonce()
PROVEN = hello(SAID, nonce=NONCE, token="right")


def test_who_has_the_token_is_believed_what_he_says() -> None:
    assert read_hello(PROVEN, nonce=NONCE, token="right") == SAID
    assert len(PROVEN) == HELLO_BYTES and b"right" not in PROVEN


@pytest.mark.parametrize("token", ["", "wrong", "right ", "Right"])
def test_another_token_proves_nothing(token: str) -> None:
    assert read_hello(PROVEN, nonce=NONCE, token=token) is None


def test_a_proof_that_was_overheard_is_of_no_use() -> None:
    assert read_hello(PROVEN, nonce=new_nonce(), token="right") is None


@pytest.mark.parametrize("position", range(HELLO_BYTES))
def test_no_byte_of_a_hello_can_be_changed(position: int) -> None:
    changed = bytearray(PROVEN)
    changed[position] ^= 1
    assert read_hello(bytes(changed), nonce=NONCE, token="right") is None


def test_tokens_and_nonces_are_fresh_and_long() -> None:
    assert new_token() != new_token() and len(new_token()) >= 22
    assert new_nonce() != new_nonce()


def test_a_greeting_brings_the_nonce() -> None:
    wire = greeting.greeting(NONCE)
    assert len(wire) == GREETING_BYTES and read_greeting(wire) == NONCE


# ---- the client, and whoever answers


@contextmanager
def answering(act: Callable[[socket.socket], None]) -> Iterator[int]:
    """-> the port where somebody takes one connection, and does with it what he likes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                act(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()


def entered(port: int) -> None:
    enter("127.0.0.1", port, token="right", said=SAID).close()


def verdict_of(verdict: int) -> Callable[[socket.socket], None]:
    def act(connection: socket.socket) -> None:
        connection.sendall(greeting.greeting(NONCE))
        assert read_hello(connection.recv(HELLO_BYTES, socket.MSG_WAITALL), nonce=NONCE, token="right") == SAID
        connection.sendall(bytes([verdict]))

    return act


def test_a_welcome_opens_the_stream() -> None:
    with answering(verdict_of(Verdict.WELCOME)) as port:
        entered(port)


@pytest.mark.parametrize(
    ("verdict", "error", "words"),
    [
        (Verdict.WRONG_TOKEN, InputError, "token: must be the one"),
        (Verdict.WRONG_VERSION, FabricError, f"does not know version {VERSION}"),
        (Verdict.BUSY, FabricError, "busy: it serves one client at a time"),
        (Verdict.REFUSED, FabricError, "refuses"),
        (77, FabricError, "77 is not a valid Verdict"),
    ],
)
def test_every_verdict_is_told_in_words(verdict: int, error: type[Exception], words: str) -> None:
    with answering(verdict_of(verdict)) as port, pytest.raises(error, match=words):
        entered(port)


def test_another_version_is_refused_before_anything_is_said() -> None:
    def newer(connection: socket.socket) -> None:
        wire = bytearray(greeting.greeting(NONCE))
        wire[len(greeting.MAGIC)] += 1
        connection.sendall(wire)
        assert connection.recv(1) == b""

    with answering(newer) as port, pytest.raises(HandshakeRefused, match=f"version differs: ours {VERSION}"):
        entered(port)


@pytest.mark.parametrize(
    ("words", "told"),
    [(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", "no `headrace fabric serve`"), (b"", "closed before")],
)
def test_whatever_else_listens_there_is_told(words: bytes, told: str) -> None:
    def stranger(connection: socket.socket) -> None:
        connection.sendall(words)

    with answering(stranger) as port, pytest.raises(FabricError, match=f"fabric serve at 127.0.0.1:{port}.*{told}"):
        entered(port)


def test_a_machine_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greeting, "LONGEST_S", 0.2)

    def silent(connection: socket.socket) -> None:
        assert connection.recv(1) == b""

    with answering(silent) as port, pytest.raises(FabricError, match="silent for") as told:
        entered(port)
    assert told.value.code == errno.ETIMEDOUT


def test_nobody_there_is_told_with_the_place() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(FabricError, match=f"127.0.0.1:{port}.*refused"):
        entered(port)
