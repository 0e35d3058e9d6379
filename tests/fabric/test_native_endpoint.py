"""The native endpoint: what it reads of its provider, what it refuses, what it leaves behind, what it costs."""

import errno
import gc
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixed_port import fixed_port

from headrace.errors import FabricError, InputError
from headrace.fabric.interface import IMM_SLOT_BITS, LAYERS_PER_STEP, Imm
from headrace.fabric.native import NativeFabric, available_transports

LENGTH = 4 << 20


@pytest.fixture
def memory_fd() -> Iterator[int]:
    fd = os.memfd_create("headrace-endpoint", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, LENGTH)
    yield fd
    os.close(fd)


def run_python(source: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(source)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_traits_say_what_tcp_can_do(memory_fd: int) -> None:
    fabric = NativeFabric(memory_fd, LENGTH)
    (traits,) = fabric.traits
    assert "tcp" in traits.provider
    assert traits.cq_data_size >= 4 and traits.wait_fd
    assert not traits.virtual_addressing and not traits.provider_keys
    assert traits.mr_key_size == 8
    assert traits.tx_size >= 128 and traits.iov_limit >= 1 and traits.rma_iov_limit >= 1 and traits.rx_size >= 64
    fabric.close()


def test_the_traits_say_what_shm_can_do(memory_fd: int) -> None:
    fabric = NativeFabric(memory_fd, LENGTH, transports=("shm",), nodes=())
    (traits,) = fabric.traits
    assert traits.provider == "shm" and traits.virtual_addressing
    assert not traits.wait_fd, "then the owner could sleep on it"
    assert not traits.provider_keys and not traits.local_registration
    assert (traits.mr_key_size, traits.tx_size, traits.rx_size) == (8, 32, 64)
    fabric.close()


def test_unknown_transports_and_foreign_nodes_are_refused(memory_fd: int) -> None:
    with pytest.raises(InputError, match=r"transports: must be of mapped, .* has 'steam'"):
        NativeFabric(memory_fd, LENGTH, transports=("steam",))  # type: ignore[arg-type]
    for none in ((), ("tcp", "tcp")):
        with pytest.raises(InputError, match="transports: must be different ones, at least one"):
            NativeFabric(memory_fd, LENGTH, transports=none)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="nodes: must be at most 4"):
        NativeFabric(memory_fd, LENGTH, nodes=["127.0.0.1"] * 5)
    with pytest.raises(FabricError, match="fi_") as foreign:
        NativeFabric(memory_fd, LENGTH, nodes=["203.0.113.7"])
    assert foreign.value.code == errno.EADDRNOTAVAIL


def test_a_transport_that_this_machine_lacks_is_refused_with_the_call(memory_fd: int) -> None:
    missing = [each for each in ("efa", "verbs") if each not in available_transports()]
    for each in missing:
        with pytest.raises(FabricError, match="fi_getinfo") as told:
            NativeFabric(memory_fd, LENGTH, transports=(each,), nodes=())  # type: ignore[arg-type]
        assert told.value.code > 0
    assert available_transports()[0] == "mapped" and available_transports()[-1] == "tcp"


def test_peers_without_a_transport_in_common_are_told_both_lists(memory_fd: int) -> None:
    mapped, tcp = (
        NativeFabric(memory_fd, LENGTH, transports=("mapped",)),
        NativeFabric(memory_fd, LENGTH, transports=("tcp",)),
    )
    with pytest.raises(InputError, match="no transport in common: ours are mapped, the peer's tcp;ofi_rxm"):
        mapped.add_peer(tcp.address)
    for each in (mapped, tcp):
        each.close()


def test_each_peer_is_reached_by_the_first_transport_that_both_have(memory_fd: int) -> None:
    both, mapped, tcp = (
        NativeFabric(memory_fd, LENGTH),
        NativeFabric(memory_fd, LENGTH, transports=("mapped",)),
        NativeFabric(memory_fd, LENGTH, transports=("tcp",)),
    )
    assert both.transport(both.add_peer(mapped.address)) == "mapped"
    assert both.transport(both.add_peer(tcp.address)) == "tcp;ofi_rxm"
    assert tcp.transport(tcp.add_peer(both.address)) == "tcp;ofi_rxm"
    three, shm = (NativeFabric(memory_fd, LENGTH, transports=(*some, "tcp")) for some in (("mapped", "shm"), ("shm",)))
    assert three.transport(three.add_peer(both.address)) == "mapped"
    assert shm.transport(shm.add_peer(both.address)) == "tcp;ofi_rxm"
    assert three.transport(three.add_peer(shm.address)) == "shm" == shm.transport(shm.add_peer(three.address))
    for each in (both, mapped, tcp, three, shm):
        each.close()


def test_who_is_bound_to_a_port_later_is_reached_where_the_first_was(memory_fd: int) -> None:
    port, writer = fixed_port(), NativeFabric(memory_fd, LENGTH, transports=("tcp",))
    first = NativeFabric(memory_fd, LENGTH, transports=("tcp",), port=port)
    address = first.address
    peer = writer.add_peer(address)
    first.close()
    second = NativeFabric(memory_fd, LENGTH, transports=("shm", "tcp"), port=port)
    assert second.address != address and writer.peer_at(second.address) == peer
    with pytest.raises(InputError, match=f"is peer {peer} already"):
        writer.add_peer(second.address)
    for each in (second, writer):
        each.close()


def test_wrong_memory_is_refused(memory_fd: int) -> None:
    with pytest.raises(InputError, match="length"):
        NativeFabric(memory_fd, LENGTH + 1)
    with pytest.raises(InputError, match="length"):
        NativeFabric(memory_fd, 0)
    with pytest.raises(InputError, match="memory_fd"):
        NativeFabric(1 << 20, LENGTH)


def test_memory_that_may_only_be_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "memory"
    file.write_bytes(bytes(LENGTH))
    fd = os.open(file, os.O_RDONLY)
    with pytest.raises(InputError, match="memory_fd: must be open for reading and writing"):
        NativeFabric(fd, LENGTH)
    os.close(fd)


def test_memory_that_peers_map_is_sealed_against_shrinking_and_refused_where_it_cannot_be(memory_fd: int) -> None:
    """A prefiller that writes to what its decoder has cut off would be ended by SIGBUS."""
    NativeFabric(memory_fd, LENGTH, transports=("tcp",)).close()
    os.ftruncate(memory_fd, LENGTH + 4096)
    for _ in range(2):
        NativeFabric(memory_fd, LENGTH).close()
    with pytest.raises(PermissionError):
        os.ftruncate(memory_fd, LENGTH)
    unsealable = os.memfd_create("headrace-endpoint")
    os.ftruncate(unsealable, LENGTH)
    with pytest.raises(InputError, match=r"memory_fd: must be a memfd that can be sealed \(MFD_ALLOW_SEALING\)"):
        NativeFabric(unsealable, LENGTH)
    NativeFabric(unsealable, LENGTH, transports=("tcp",)).close()
    os.close(unsealable)


def test_the_memory_fd_may_be_closed_after_the_start() -> None:
    fd = os.memfd_create("headrace-endpoint", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, LENGTH)
    fabric = NativeFabric(fd, LENGTH)
    os.close(fd)
    assert fabric.grant(fabric.add_peer(fabric.address)).length == LENGTH
    fabric.close()


def test_it_shows_itself(memory_fd: int) -> None:
    fabric = NativeFabric(memory_fd, LENGTH)
    fabric.add_peer(fabric.address)
    fabric.arm(Imm(1), 1)
    assert "1 peers, 0 transfers, 1 counters" in repr(fabric)
    fabric.close()
    assert "closed" in repr(fabric)


def test_an_address_that_cannot_be_one_is_refused_and_one_known_is_told(memory_fd: int) -> None:
    fabric = NativeFabric(memory_fd, LENGTH)
    with pytest.raises(InputError, match="address"):
        fabric.add_peer(b"short")
    peer = fabric.add_peer(fabric.address)
    with pytest.raises(InputError, match="address"):
        fabric.add_peer(fabric.address)
    fabric.remove_peer(peer)
    assert fabric.add_peer(fabric.address) != peer
    fabric.close()


def test_the_native_constants_are_the_interfaces(memory_fd: int) -> None:
    """Slots: two imms that differ by one generation collide, two that differ by less do not. Layers: the largest."""
    fabric = NativeFabric(memory_fd, LENGTH)
    fabric.arm(Imm(7), 1)
    with pytest.raises(InputError, match="slot"):
        fabric.arm(Imm(7 + (1 << IMM_SLOT_BITS)), 1)
    fabric.arm(Imm(7 + (1 << (IMM_SLOT_BITS - 1))), 1)
    fabric.raise_layers(LAYERS_PER_STEP)
    with pytest.raises(InputError, match="counter"):
        fabric.raise_layers(-1)
    fabric.close()


def test_nothing_is_left_behind_after_many_endpoints(memory_fd: int) -> None:
    def left() -> tuple[int, int, int]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text().count("headrace-endpoint")
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), maps

    def once() -> None:
        fabric = NativeFabric(memory_fd, LENGTH)
        fabric.grant(fabric.add_peer(fabric.address))
        fabric.close()

    once()
    before = left()
    for _ in range(50):
        once()
    assert left() == before


def test_an_endpoint_without_close_ends_with_its_object_and_with_the_process(memory_fd: int) -> None:
    before = set(os.listdir("/proc/self/task"))  # some of an earlier test may be ending
    fabric = NativeFabric(memory_fd, LENGTH)
    assert set(os.listdir("/proc/self/task")) - before
    del fabric
    gc.collect()
    assert not set(os.listdir("/proc/self/task")) - before
    ended = run_python(
        """
        import os
        from headrace.fabric.native import NativeFabric
        fd = os.memfd_create("m", os.MFD_ALLOW_SEALING); os.ftruncate(fd, 4096)
        kept = [NativeFabric(fd, 4096) for _ in range(3)]
        """
    )
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("when", ["idle", "in a call"])
def test_ctrl_c_is_still_a_keyboard_interrupt(when: str) -> None:
    work = "time.sleep(30)" if when == "idle" else "[fabric.statistics() for _ in range(10**9)]"
    ended = run_python(
        f"""
        import os, signal, threading, time
        signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started us may ignore it
        before = [signal.getsignal(number) for number in signal.valid_signals()]
        from headrace.fabric.native import NativeFabric
        fd = os.memfd_create("m", os.MFD_ALLOW_SEALING); os.ftruncate(fd, 4096)
        fabric = NativeFabric(fd, 4096)
        assert [signal.getsignal(number) for number in signal.valid_signals()] == before
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            {work}
        except KeyboardInterrupt:
            print("interrupted")
        fabric.close()
        """
    )
    assert ended.stdout == "interrupted\n", ended.stderr
    assert ended.returncode == 0


def test_looking_for_transports_leaves_the_handlers_of_signals_as_they_were() -> None:
    """It opens an endpoint of each provider, and shm's first one puts handlers of its own in their place. Python does
    not see that: the system is asked."""
    ended = run_python(
        """
        import ctypes, signal
        from headrace.fabric.native import available_transports
        libc, space = ctypes.CDLL(None), ctypes.create_string_buffer(256)
        def handlers():
            found = []
            for number in signal.valid_signals():
                libc.sigaction(int(number), None, space)
                found.append(space.raw[: ctypes.sizeof(ctypes.c_void_p)])
            return found
        before = handlers()
        assert "shm" in available_transports()
        assert handlers() == before
        """
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_sigterm_still_ends_the_process_by_itself() -> None:
    """Python's table of handlers does not show what a library put behind its back; the exit status does."""
    ended = run_python(
        """
        import os, signal
        from headrace.fabric.native import NativeFabric
        fd = os.memfd_create("m", os.MFD_ALLOW_SEALING); os.ftruncate(fd, 4096)
        fabric = NativeFabric(fd, 4096)
        os.kill(os.getpid(), signal.SIGTERM)
        """
    )
    assert (ended.returncode, ended.stderr) == (-15, "")


def owner_switches() -> int:
    """How often this process's one owner thread was put on or off a core so far."""
    [owner] = [task for task in Path("/proc/self/task").iterdir() if "headrace" in (task / "comm").read_text()]
    return sum(int(line.split()[1]) for line in (owner / "status").read_text().splitlines() if "ctxt_switches" in line)


@pytest.mark.timing
def test_a_waiting_owner_costs_the_compute_on_its_core_nothing_measurable(memory_fd: int) -> None:
    """With a peer, a connection, an armed counter and an open transfer whose program waits for its layer. The ratio of
    times is benchmarks/waiting_owner.py's; what can be told without noise is what the owner takes: time and turns."""
    fabric = NativeFabric(memory_fd, LENGTH)
    peer = fabric.add_peer(fabric.address)
    fabric.connect(peer, fabric.grant(peer))
    fabric.send(peer, b"so that there is a connection")
    fabric.arm(Imm(3), 10)
    transfer = fabric.open_transfer(peer, Imm(3))
    fabric.submit_write(transfer, src_offset=0, dst_offset=4096, length=4096)
    time.sleep(0.3)
    assert fabric.statistics().num_messages_received == 1
    before, begun = fabric.owner_cpu_ns(), time.monotonic_ns()
    switches = owner_switches()
    time.sleep(2.0)
    switches = owner_switches() - switches
    share = (fabric.owner_cpu_ns() - before) / (time.monotonic_ns() - begun)
    fabric.close()
    assert share < 0.01
    assert switches <= 60, "it sleeps: a look every 100 ms is all that it takes"
