"""A side of its own: what it answers to whom, what it does with questions out of place, and files of dead endpoints."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from limits_memories import endpoint_files, placed

from headrace.errors import FabricError, InputError
from headrace.fabric.limits import names, wire
from headrace.fabric.limits.links import Sides, libfabric_link, socket_link, wake_link
from headrace.fabric.limits.memories import fresh_memories
from headrace.fabric.limits.side import serve_side


@dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """A side that was given nothing but a connection."""

    stream: socket.socket
    process: "subprocess.Popen[bytes]"
    errors: Path

    def ask(self, question: wire.Message) -> wire.Answer | None:
        wire.tell(self.stream, question, timeout_s=20)
        return wire.next_answer(self.stream, deadline=time.monotonic() + 20)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Elsewhere]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    path = tmp_path / "errors"
    with ours:
        with theirs, path.open("wb") as errors:
            process = serve_side(theirs, errors=errors.fileno())
        yield Elsewhere(stream=ours, process=process, errors=path)
    process.kill()
    process.wait()


def test_a_side_elsewhere_takes_pages_through_a_socket(elsewhere: Elsewhere) -> None:
    sides = Sides(peer=elsewhere.stream, timeout_s=20)
    with fresh_memories(1 << 20) as memories, socket_link(memories, sides=sides) as link:
        assert link.process_ids[1] is None
        assert link.run(placed([0, 9], [1 << 19, 3], 1000)).receiver_cpu_s > 0
        assert link.round_trips(5).p50_ns > 0
    assert elsewhere.process.wait(5) == 0


def test_a_side_elsewhere_takes_pages_by_libfabric(elsewhere: Elsewhere) -> None:
    sides = Sides(peer=elsewhere.stream, timeout_s=20)
    with fresh_memories(1 << 20) as memories, libfabric_link("tcp;ofi_rxm", memories, sides=sides) as link:
        assert link.run(placed([0, 9], [1 << 19, 3], 1000)).receiver_cpu_s > 0
        elsewhere.process.kill()
        with pytest.raises(FabricError, match="second side: closed the connection"):
            link.round_trips(10)


def test_what_reaches_no_other_host_is_refused(elsewhere: Elsewhere) -> None:
    sides = Sides(peer=elsewhere.stream)
    with fresh_memories(4096) as memories:
        with pytest.raises(InputError, match="provider"), libfabric_link("shm", memories, sides=sides):
            pytest.fail("opened")
        with pytest.raises(InputError, match="peer"), wake_link("futex", sides=sides):
            pytest.fail("opened")


def test_questions_out_of_place_are_refused_one_by_one(
    elsewhere: Elsewhere,
) -> None:
    target = wire.Target(address=b"", base=0, key=0, length=8)
    pages = {"src_offsets": b"", "dst_offsets": b"", "page_bytes": 1}
    before = [
        wire.Ping(num_rounds=1, pause_ns=0),
        wire.Send(**pages, window=1),
        wire.ConnectEndpoint(target=target),
        wire.OpenWake(kind="futex"),
        wire.OpenEndpoint(provider="tcp;ofi_rxm", node=None, name=None),
    ]
    for question in before:
        assert isinstance(elsewhere.ask(question), wire.Refused), question
    assert elsewhere.ask(wire.MakeMemory(num_bytes=4096)) == wire.Done()
    assert isinstance(elsewhere.ask(wire.MakeMemory(num_bytes=4096)), wire.Refused)
    assert isinstance(elsewhere.ask(wire.Connect(host="127.0.0.1", port=1)), wire.Refused)  # nobody listens there
    assert isinstance(elsewhere.ask(wire.OpenEndpoint(provider="tcp;ofi_rxm", node=None, name=None)), wire.Target)
    after = [
        wire.ConnectEndpoint(target=target),
        wire.Send(**pages, window=1),
        wire.Receive(dst_offsets=b"123", page_bytes=1),
    ]
    for question in after:
        assert isinstance(elsewhere.ask(question), wire.Refused), question
    assert elsewhere.process.poll() is None


def framed(message: dict[str, object]) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "little") + body


@pytest.mark.parametrize(
    "junk",
    [
        b"\xff\xff\xff\xff",
        b"\x00\x00\x00\x00",
        b"\x03\x00\x00\x00abc",
        framed({"type": "Pong", "num_rounds": -1}),
        framed({"type": "OpenEndpoint", "provider": "shm", "node": None, "name": "../../etc/passwd"}),
    ],
)
def test_what_is_no_question_ends_the_side(junk: bytes, elsewhere: Elsewhere) -> None:
    elsewhere.stream.sendall(junk)
    assert elsewhere.process.wait(10) == 1
    told = elsewhere.errors.read_text()
    assert told.startswith("not a question: ") and len(told.splitlines()) == 1


def test_half_a_question_ends_the_side_quietly(elsewhere: Elsewhere) -> None:
    elsewhere.stream.sendall(b"\x10\x00\x00\x00abc")
    elsewhere.stream.shutdown(socket.SHUT_WR)
    assert elsewhere.process.wait(10) == 0
    assert elsewhere.errors.read_bytes() == b""


# ---- files of endpoints ----------------------------------------------------------------------------------------


def test_only_files_of_processes_that_have_ended_are_swept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(names, "FOLDER", tmp_path)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    kept = [names.new_name(os.getpid()) + ":0:0", "headrace-limits-1-2-00000000:0:0", "headrace-limits-odd", "other"]
    swept = [names.new_name(ended.pid) + ":0:0", names.new_name(ended.pid)]
    for name in kept + swept:
        (tmp_path / name).touch()
    names.sweep()
    assert sorted(os.listdir(tmp_path)) == sorted(kept)


def test_a_new_shm_link_sweeps_and_names_its_files() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left = names.FOLDER / (names.new_name(ended.pid) + ":0:0")
    left.touch()
    with fresh_memories(4096) as memories, libfabric_link("shm", memories, sides=Sides(timeout_s=20)) as link:
        assert not left.exists()
        assert {int(name.split("-")[3]) for name in endpoint_files()} == set(link.process_ids)
    assert endpoint_files() == []
