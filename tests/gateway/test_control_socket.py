"""The ROUTER and its file: who may connect, who is displaced, what is dropped, who cannot be reached."""

import asyncio
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from scripted_instance import announce, on_loop, status, until

from headrace.errors import InputError
from headrace.gateway.control import MOST_AT_ONCE, ControlSocket
from headrace.protocol.control import MAX_MESSAGE_BYTES, Beat, InstanceMessage, decode_from_gateway, encode_control

D1, D2, GATEWAY = "d" * 32, "e" * 32, "a" * 32


def dealer(context: zmq.asyncio.Context, endpoint: str, uuid: str = "", *, rcvhwm: int = 1000) -> zmq.asyncio.Socket:
    connected = context.socket(zmq.DEALER)
    connected.setsockopt(zmq.RCVHWM, rcvhwm)
    connected.setsockopt(zmq.IPV6, "[" in endpoint)
    connected.setsockopt(zmq.LINGER, 200)
    if uuid:
        connected.setsockopt(zmq.ROUTING_ID, uuid.encode())
    connected.connect(endpoint)
    return connected


@contextmanager
def bound(endpoint: str) -> Iterator[tuple[ControlSocket, zmq.asyncio.Context]]:
    """A control socket, and a context for those who connect to it."""
    control, context = ControlSocket(endpoint), zmq.asyncio.Context()
    try:
        yield control, context
    finally:
        context.destroy(linger=0)
        control.close()


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("endpoint", ["ipc://{folder}/control.sock", "tcp://127.0.0.1:*", "tcp://[::1]:*"])
def test_messages_go_both_ways(tmp_path: Path, endpoint: str) -> None:
    if "::1" in endpoint and not _has_ipv6():
        pytest.skip("no IPv6 here")

    async def play() -> None:
        with bound(endpoint.format(folder=tmp_path)) as (control, context):
            instance = dealer(context, control.endpoint, D1)
            await instance.send(encode_control(announce("decoder", D1)))
            assert await control.receive() == [announce("decoder", D1)]
            assert control.send(D1, Beat(sender=GATEWAY))
            assert decode_from_gateway(await instance.recv()) == Beat(sender=GATEWAY)

    asyncio.run(play())


@on_loop
async def test_nobody_there_is_an_answer_and_so_is_somebody_who_left(tmp_path: Path) -> None:
    with bound(f"ipc://{tmp_path}/control.sock") as (control, context):
        assert not control.send(D1, Beat(sender=GATEWAY))
        instance = dealer(context, control.endpoint, D1)
        await instance.send(encode_control(status(D1)))
        await control.receive()
        assert control.send(D1, Beat(sender=GATEWAY))
        instance.close(0)
        await until(lambda: not control.send(D1, Beat(sender=GATEWAY)))


@on_loop
async def test_somebody_who_reads_nothing_cannot_be_reached_in_the_end(tmp_path: Path) -> None:
    with bound(f"ipc://{tmp_path}/control.sock") as (control, context):
        instance = dealer(context, control.endpoint, D1, rcvhwm=1)
        await instance.send(encode_control(status(D1)))
        await control.receive()
        sent = 0
        while control.send(D1, Beat(sender=GATEWAY)):
            sent += 1
            assert sent < 100_000


@on_loop
async def test_what_is_no_message_is_dropped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with bound(f"ipc://{tmp_path}/control.sock") as (control, context):
        nameless, instance = dealer(context, control.endpoint), dealer(context, control.endpoint, D1)
        received: list[InstanceMessage] = []

        async def receive() -> None:
            while True:
                received.extend(await control.receive())

        receiving = asyncio.create_task(receive())
        await nameless.send(encode_control(status(D1)))
        await instance.send(b"garbage")
        await instance.send_multipart([b"", encode_control(status(D1))])
        await instance.send(encode_control(status(D2)))
        await instance.send(encode_control(Beat(sender=D1)))
        await instance.send(encode_control(status(D1)))
        await until(lambda: control.num_dropped == {"malformed": 3, "sender": 2} and len(received) == 1)
        assert received == [status(D1)]
        assert len(caplog.records) == 2, "one line for each peer"
        assert "'sender': 2" in repr(control)
        receiving.cancel()


@on_loop
async def test_a_message_that_is_too_large_ends_its_sender_and_nobody_else(tmp_path: Path) -> None:
    with bound(f"ipc://{tmp_path}/control.sock") as (control, context):
        huge, instance = dealer(context, control.endpoint, D1), dealer(context, control.endpoint, D2)
        await huge.send(bytes(MAX_MESSAGE_BYTES + 1))
        await instance.send(encode_control(status(D2)))
        assert [message.sender for message in await control.receive()] == [D2]
        assert not control.send(D1, Beat(sender=GATEWAY))


@on_loop
async def test_what_came_just_before_a_send_is_not_overlooked(tmp_path: Path) -> None:
    with bound(f"ipc://{tmp_path}/control.sock") as (control, context):
        instance = dealer(context, control.endpoint, D1)
        await instance.send(encode_control(status(D1)))
        await control.receive()
        receiving = asyncio.create_task(control.receive())
        await asyncio.sleep(0)
        await instance.send(encode_control(status(D1)))
        time.sleep(0.05)  # the loop does not run, and sees no descriptor
        assert control.send(D1, Beat(sender=GATEWAY))
        assert await asyncio.wait_for(receiving, 2) == [status(D1)]


@on_loop
async def test_a_flood_is_read_in_parts(tmp_path: Path) -> None:
    with bound(f"ipc://{tmp_path}/control.sock") as (control, context):
        instance = dealer(context, control.endpoint, D1)
        for _ in range(MOST_AT_ONCE + 1):
            await instance.send(encode_control(status(D1)))
        time.sleep(0.05)
        assert [len(await control.receive()) for _ in range(2)] == [MOST_AT_ONCE, 1]


# ---- the file --------------------------------------------------------------------------------------------------------


@on_loop
async def test_the_socket_is_for_this_user_alone_and_its_folder_too(tmp_path: Path) -> None:
    path = tmp_path / "run" / "control.sock"
    control = ControlSocket(f"ipc://{path}")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    control.close()
    control.close()
    assert not path.exists()


@on_loop
async def test_a_folder_that_others_can_open_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir(mode=0o755)
    with pytest.raises(InputError, match="control: must lie in a folder of this user with mode 0700, .* has mode 0755"):
        ControlSocket(f"ipc://{folder}/control.sock")


@on_loop
async def test_the_file_of_a_dead_process_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    control = ControlSocket(f"ipc://{path}")
    control.close()


@on_loop
async def test_a_living_socket_is_not_displaced(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/control.sock"
    with bound(endpoint) as (control, context):
        with pytest.raises(InputError, match=f"control: {endpoint} is in use"):
            ControlSocket(endpoint)
        instance = dealer(context, control.endpoint, D1)
        await instance.send(encode_control(status(D1)))
        assert [message.sender for message in await control.receive()] == [D1]


@on_loop
async def test_one_whose_backlog_is_full_lives_too(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX) as living, socket.socket(socket.AF_UNIX) as first:
        living.bind(str(path))
        living.listen(0)
        first.connect(str(path))
        with pytest.raises(InputError, match="is in use"):
            ControlSocket(f"ipc://{path}")


@on_loop
async def test_another_file_than_ones_own_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    control = ControlSocket(f"ipc://{path}")
    path.unlink()
    path.write_text("somebody else's")
    control.close()
    assert path.read_text() == "somebody else's"


def _a_file(folder: Path) -> str:
    (folder / "control.sock").write_text("")
    return f"ipc://{folder}/control.sock"


@pytest.mark.parametrize(
    ("endpoint", "text"),
    [
        (_a_file, "control: must be free for a socket"),
        (lambda folder: "ipc://@abstract", "control: must be a file, which has a mode"),
        (lambda folder: f"ipc://{folder}/{'x' * 120}", "control: must be a ZeroMQ endpoint"),
        (lambda folder: "nonsense", "control: must be a ZeroMQ endpoint, is 'nonsense'"),
        (lambda folder: "carrier://pigeon", "control: must be a ZeroMQ endpoint"),
        (lambda folder: "tcp://203.0.113.1:5555", "control: must be a ZeroMQ endpoint"),
        (lambda folder: "ipc:///proc/nowhere/control.sock", "control: cannot be bound"),
    ],
    ids=["file", "abstract", "long", "nonsense", "transport", "foreign address", "no folder"],
)
def test_what_cannot_be_bound_is_refused_by_name(tmp_path: Path, endpoint: Callable[[Path], str], text: str) -> None:
    async def play() -> None:
        with pytest.raises(InputError, match=text):
            ControlSocket(endpoint(tmp_path))

    asyncio.run(play())


@on_loop
async def test_a_port_that_is_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(InputError, match=f"control: {endpoint} is in use"):
            ControlSocket(endpoint)
