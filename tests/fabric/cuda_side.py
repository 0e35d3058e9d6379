"""CUDA memory through the mapped transport, between two fabrics of this process, or one and another process.

Run with a driver made of memory files (fake_libcuda.c) in the library path. Prints what it saw as one JSON object.
"""

import ctypes
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace.errors import InputError
from headrace.fabric import (
    CudaMemory,
    Descriptor,
    Imm,
    NativeFabric,
    PageReads,
    Pages,
    PageWrites,
    PeerId,
    Reached,
    Revoked,
    SharedMemory,
    TransferDone,
    TransferId,
)
from headrace.fabric.interface import LAYERS_PER_STEP

PAGE = 64 * 1024
NUM_PAGES = 64
LONG = 64 << 20
E = TypeVar("E")
driver = ctypes.CDLL("libcuda.so.1")


def seen(memory: CudaMemory) -> NDArray[np.uint8]:
    """The bytes, which this driver keeps where they can be looked at."""
    told = memory.__cuda_array_interface__
    assert told["shape"] == (memory.num_bytes,) and told["typestr"] == "|u1" and told["version"] == 3
    address = told["data"][0]  # type: ignore[index]
    return np.ctypeslib.as_array((ctypes.c_uint8 * memory.num_bytes).from_address(address))


def open_fabric(memory: CudaMemory) -> NativeFabric:
    return NativeFabric(memory.fd, NUM_PAGES * PAGE, cuda_device=0, transports=("mapped",))


def wait(fabric: NativeFabric, kind: type[E]) -> E:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        for event in fabric.drain_events():
            if isinstance(event, kind):
                return event
        time.sleep(0.001)
    raise AssertionError(f"no {kind.__name__} came")


def pages(indices: list[int]) -> Pages:
    return Pages(offset=0, layer_stride=0, page_stride=PAGE, indices=np.array(indices))


steps = itertools.count()


def send(fabric: NativeFabric, peer: PeerId, imm: int, source: list[int], target: list[int]) -> TransferDone:
    transfer = fabric.open_transfer(peer, Imm(imm), deadline_s=20)
    positions = np.arange(len(source))
    writes = PageWrites(
        src=pages(source), dst=pages(target), positions=positions, layer_begin=0, layer_end=1, length=PAGE
    )
    step = next(steps)
    fabric.submit_program(step, [(transfer, writes)])
    fabric.submit_last(transfer)  # known to be all before the first is copied: it ends with its last copy
    fabric.raise_layers(step * LAYERS_PER_STEP + 1)
    return wait(fabric, TransferDone)


def send_a_layer(fabric: NativeFabric, peer: PeerId, imm: int, page: int) -> TransferId:
    """The first of two layers of two pages each; the list stays open, with as much to come."""
    transfer = fabric.open_transfer(peer, Imm(imm), deadline_s=20)
    both = Pages(offset=page * PAGE, layer_stride=2 * PAGE, page_stride=PAGE, indices=np.arange(2))
    writes = PageWrites(src=both, dst=both, positions=np.arange(2), layer_begin=0, layer_end=2, length=PAGE)
    step = next(steps)
    fabric.submit_program(step, [(transfer, writes)])
    fabric.raise_layers(step * LAYERS_PER_STEP + 1)
    return transfer


def give_up_in_the_middle() -> int:
    """-> copies that could land after a transfer of one long write was closed."""
    theirs, ours = CudaMemory(LONG), CudaMemory(LONG)
    reader, writer = (NativeFabric(each.fd, LONG, cuda_device=0, transports=("mapped",)) for each in (theirs, ours))
    to_reader = writer.add_peer(reader.address)
    writer.connect(to_reader, reader.grant(reader.add_peer(writer.address)))
    send(writer, to_reader, 5, [0], [0])  # the memory is mapped
    transfer = writer.open_transfer(to_reader, Imm(6), deadline_s=20)
    writer.submit_write(transfer, src_offset=0, dst_offset=0, length=LONG)
    writer.close_transfer(transfer)
    pending: int = driver.fake_num_pending()
    for each in (reader, writer, theirs, ours):
        each.close()
    return pending


def left_behind() -> list[int]:
    counts = ("fake_num_ranges", "fake_num_handles", "fake_num_contexts", "fake_depth")
    return [getattr(driver, name)() for name in counts]


def refusal(act: Callable[[], object]) -> str:
    try:
        act()
    except InputError as error:
        return str(error)
    return "taken"


def one_process() -> dict[str, object]:
    theirs, ours = CudaMemory(NUM_PAGES * PAGE - 5), CudaMemory(NUM_PAGES * PAGE)
    reader, writer = open_fabric(theirs), open_fabric(ours)
    from_writer = reader.add_peer(writer.address)
    descriptor = reader.grant(from_writer)
    to_reader = writer.add_peer(reader.address)
    writer.connect(to_reader, descriptor)

    ours_seen, theirs_seen = seen(ours), seen(theirs)
    ours_seen[:] = np.arange(len(ours_seen), dtype=np.uint64).view(np.uint8)[: len(ours_seen)]
    wanted = ours_seen.reshape(-1, PAGE)[[0, 7, 63]].copy()
    reader.arm(Imm(1), 3)
    failed = send(writer, to_reader, 1, [0, 7, 63], [63, 5, 9]).num_failed
    ours_seen[:] = 0xEE  # the transfer is done: its source may be reused
    wait(reader, Reached)
    landed = bool((theirs_seen.reshape(-1, PAGE)[[63, 5, 9]] == wanted).all())
    others = int(np.delete(theirs_seen.reshape(-1, PAGE), [63, 5, 9], axis=0).any())

    reader.arm(Imm(4), 2)
    transfer = send_a_layer(writer, to_reader, 4, 20)
    wait(reader, Reached)
    layer = theirs_seen.reshape(-1, PAGE)[[20, 21, 22]].tolist()
    writer.close_transfer(transfer)
    wait(writer, TransferDone)
    at_once = reader.revoke(from_writer)
    wait(reader, Revoked)
    after = send(writer, to_reader, 1, [0], [40])

    host = SharedMemory(NUM_PAGES * PAGE)
    plain = NativeFabric(host.fd, host.num_bytes, transports=("mapped",))
    to_host = writer.add_peer(plain.address)
    writer.connect(to_host, plain.grant(plain.add_peer(writer.address)))
    plain.arm(Imm(2), 1)
    send(writer, to_host, 2, [3], [4])
    wait(plain, Reached)
    reading = PageReads(pages=pages([0]), positions=np.arange(1), layer_begin=0, layer_end=1, length=PAGE)
    to_device = plain.add_peer(reader.address)
    told = {
        "failed": failed,
        "landed": landed,
        "others": others,
        "layer": [sorted(set(page)) for page in layer],
        "revoked_at_once": at_once,
        "after_revoke": after.num_posted,
        "to_host": bool((host.bytes[4 * PAGE : 5 * PAGE] == 0xEE).all()),
        "digest": refusal(lambda: reader.submit_digest([reading], 1)),
        "digests": refusal(lambda: writer.open_transfer(to_host, Imm(3), num_pages=1)),
        "from_host": refusal(lambda: plain.connect(to_device, reader.grant(reader.add_peer(plain.address)))),
        "device": refusal(lambda: CudaMemory(1, device=2)),
    }
    for each in (reader, writer, plain):
        each.close()
    ours.close()
    theirs.close()
    told["pending"] = give_up_in_the_middle()
    return {**told, "left_behind": left_behind()}


def two_processes() -> dict[str, object]:
    theirs = CudaMemory(NUM_PAGES * PAGE)
    reader = open_fabric(theirs)
    reader.arm(Imm(1), NUM_PAGES)
    command = [sys.executable, __file__, "writer", reader.address.hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None and other.stdout is not None
        from_writer = reader.add_peer(bytes.fromhex(other.stdout.readline()))
        print(reader.grant(from_writer).encode().hex(), file=other.stdin, flush=True)
        arrivals = wait(reader, Reached).arrivals
        landed = bool((seen(theirs) == 77).all())
        at_once = reader.revoke(from_writer)  # it lives, and lets go
        wait(reader, Revoked)
        other.stdin.close()
        rest = json.loads(other.stdout.read())
    reader.close()
    theirs.close()
    return {
        "arrivals": arrivals,
        "landed": landed,
        "revoked_at_once": at_once,
        "left_behind": left_behind(),
        "writer": rest,
    }


def writer(reader: str) -> list[int]:
    ours = CudaMemory(NUM_PAGES * PAGE)
    seen(ours)[:] = 77
    fabric = open_fabric(ours)
    to_reader = fabric.add_peer(bytes.fromhex(reader))
    print(fabric.address.hex(), flush=True)
    fabric.connect(to_reader, Descriptor.decode(bytes.fromhex(sys.stdin.readline())))
    order = list(range(NUM_PAGES))
    assert send(fabric, to_reader, 1, order, order[::-1]).num_failed == 0
    sys.stdin.read()
    fabric.close()
    ours.close()
    return left_behind()


if __name__ == "__main__":
    acts: dict[str, Callable[..., object]] = {"one": one_process, "two": two_processes, "writer": writer}
    print(json.dumps(acts[sys.argv[1]](*sys.argv[2:])))
