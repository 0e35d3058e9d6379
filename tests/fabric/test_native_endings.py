"""Ends that nobody planned: an owner that fails, a forked child that exits."""

import subprocess
import sys
import textwrap

import pytest


def run_python(source: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(source)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_an_owner_that_fails_wakes_the_reader_of_its_events_and_every_call_tells() -> None:
    """With nothing open there is no event to tell: the fd must be readable all the same, and stay so."""
    ended = run_python(
        """
        import os, resource, select, time
        from headrace.fabric.native import NativeFabric
        fd = os.memfd_create("m", os.MFD_ALLOW_SEALING); os.ftruncate(fd, 4096)
        fabric = NativeFabric(fd, 4096)
        own = fabric.add_peer(fabric.address)
        fabric.send(own, b"so that there is a connection")
        while not fabric.drain_events():
            time.sleep(0.01)
        poller = select.poll(); poller.register(fabric.event_fd, select.POLLIN)
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        message = bytes(16 << 20)
        fabric.send(own, message)
        resource.setrlimit(resource.RLIMIT_DATA, (4096, hard))  # no memory in which to join it again
        told = poller.poll(10_000)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
        assert told, "never told"
        send = lambda: fabric.send(own, b"y")
        for act in (fabric.drain_events, fabric.drain_events, fabric.statistics, send):
            try:
                act()
            except MemoryError:
                print("failed")
        assert poller.poll(0)
        fabric.close()
        """
    )
    assert (ended.returncode, ended.stdout) == (0, "failed\n" * 4), ended.stderr


@pytest.mark.parametrize("transports", [("mapped", "tcp"), ("shm",)])
def test_a_forked_child_is_told_closed_and_its_exit_does_not_disturb_the_parent(transports: tuple[str, ...]) -> None:
    ended = run_python(
        f"""
        import os, sys, time
        from headrace.errors import Closed
        from headrace.fabric.native import NativeFabric
        fd = os.memfd_create("m", os.MFD_ALLOW_SEALING); os.ftruncate(fd, 4096)
        fabric, other = (NativeFabric(fd, 4096, transports={transports}) for _ in range(2))
        peer = fabric.add_peer(other.address)
        fabric.connect(peer, other.grant(other.add_peer(fabric.address)))
        def carries(message):
            transfer = fabric.open_transfer(peer, 5)
            fabric.submit_write(transfer, src_offset=0, dst_offset=0, length=4096)
            fabric.submit_last(transfer)
            fabric.send(peer, message)
            told, until = [], time.monotonic() + 10
            while time.monotonic() < until:
                told += other.drain_events()
                if len(told) >= 2:
                    return any(getattr(event, "message", None) == message for event in told)
                time.sleep(0.01)
            return False
        assert carries(b"before")
        child = os.fork()
        if child == 0:
            for act in (fabric.statistics, fabric.drain_events, lambda: fabric.send(peer, b"child")):
                try:
                    act()
                except Closed:
                    continue
                os._exit(7)
            sys.exit(0)
        assert os.waitpid(child, 0) == (child, 0)
        assert carries(b"after")
        print("undisturbed")
        """
    )
    assert (ended.returncode, ended.stdout) == (0, "undisturbed\n"), ended.stderr
