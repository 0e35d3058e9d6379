"""NativeFabric: the Fabric over mapped memory and libfabric, with one owner thread in the native module.

Owns the translation between the interface's records and the native module's integers, nothing else: tables, order and
waiting live with the owner thread (native/owner/owner.h). Calls come from any thread. Must not be used across a fork.
"""

import math
import os
import secrets
import weakref
from collections.abc import Sequence
from typing import Literal, Protocol

# Debian's libfabric loads PSM, which would replace the handlers of SIGINT and others as it loads: Ctrl-C would then end
# Python without a KeyboardInterrupt. It reads these names once, so they precede the import.
os.environ.setdefault("IPATH_NO_BACKTRACE", "1")
os.environ.setdefault("HFI_NO_BACKTRACE", "1")
# A registration that verbs has in its cache stays open when it is closed: a peer's access would never end.
os.environ.setdefault("FI_MR_CACHE_MAX_COUNT", "0")

import numpy as np
from numpy.typing import NDArray

from headrace.errors import InputError
from headrace.fabric import _native
from headrace.fabric.interface import (
    Descriptor,
    DigestId,
    Digests,
    DigestsReady,
    Event,
    FabricStatistics,
    Imm,
    LastWrite,
    MessageReceived,
    PageReads,
    PageWrites,
    PeerHeard,
    PeerId,
    PeerLost,
    PeerSilent,
    Reached,
    Revoked,
    SendFailed,
    Surplus,
    TransferDone,
    TransferId,
)
from headrace.fabric.places import plan_places, plan_watch


class _RaiseLayers(Protocol):
    def __call__(self, counter: int) -> None: ...


class _Events:
    """Collects what one drain tells, as the interface's records."""

    def __init__(self) -> None:
        self.told: list[Event] = []

    def message_received(self, message: bytes, /) -> None:
        self.told.append(MessageReceived(message=message))

    def send_failed(self, peer: int, code: int, text: str, /) -> None:
        self.told.append(SendFailed(peer=PeerId(peer), code=code, text=text))

    def reached(self, imm: int, arrivals: int, at_ns: int, /) -> None:
        self.told.append(Reached(imm=Imm(imm), arrivals=arrivals, at_ns=at_ns))

    def surplus(self, imm: int, arrivals: int, armed: bool, /) -> None:
        self.told.append(Surplus(imm=Imm(imm), arrivals=arrivals, armed=armed))

    def transfer_done(
        self, *, transfer: int, num_posted: int, num_failed: int, complete: bool, code: int, text: str
    ) -> None:
        done = TransferDone(
            transfer=TransferId(transfer),
            num_posted=num_posted,
            num_failed=num_failed,
            complete=complete,
            code=code,
            text=text,
        )
        self.told.append(done)

    def digests_ready(self, digest: int, digests: Digests, /) -> None:
        self.told.append(DigestsReady(digest=DigestId(digest), digests=digests))

    def peer_lost(self, peer: int, code: int, text: str, /) -> None:
        self.told.append(PeerLost(peer=PeerId(peer), code=code, text=text))

    def peer_silent(self, peer: int, /) -> None:
        self.told.append(PeerSilent(peer=PeerId(peer)))

    def peer_heard(self, peer: int, /) -> None:
        self.told.append(PeerHeard(peer=PeerId(peer)))

    def revoked(self, peer: int, /) -> None:
        self.told.append(Revoked(peer=PeerId(peer)))


Transport = Literal["mapped", "shm", "efa", "verbs", "tcp"]

PROVIDERS = {"shm": "shm", "efa": "efa", "verbs": "verbs;ofi_rxm", "tcp": "tcp;ofi_rxm"}
"""The libfabric provider of each transport that goes over one. efa and verbs were never run."""


def available_transports() -> tuple[Transport, ...]:
    """What this machine can do, by preference: its own memory, RDMA where there are such NICs, TCP."""
    perhaps: tuple[Transport, ...] = ("shm", "efa", "verbs")
    return ("mapped", *(each for each in perhaps if _native.has_provider(PROVIDERS[each])), "tcp")


class NativeFabric:
    """The first `length` bytes of the file `memory_fd`, open to peers by `transports`, the first that both sides have:
    "mapped" and "shm" serve peers of this host, the others listen at the local addresses `nodes` (one NIC each; efa's
    go by their names, see `places`; empty: the provider's choice) on `port` (0: a fresh one, as PROTOCOL wants; a fixed
    one is for sites whose firewall asks for it).

    The owner thread runs on `cpus` (empty: on any). With `beside`, another device of this process (memory of its own,
    NICs of its own), both count with the same imm counters: arm and disarm on either, Reached and Surplus are told by
    the one that came first.

    Peers are watched from a thread of its own over control connections (for TCP at the first address of `nodes`, on a
    port next to `port`): PeerLost when one breaks, PeerSilent after `silence_s` without a heartbeat.

    With `cuda_device` the file is a `CudaMemory`'s (never run on a device). What a transfer reads must be there by the
    time that it is submitted or its layer raised; there are no digests; shm and tcp are refused, from which such memory
    could not be taken back.

    The file is mapped here and again for every peer; the descriptor may be closed afterwards. For "mapped" it must be a
    memfd, and never shrinks from now on, since peers would die of it: it is sealed (F_SEAL_SHRINK), and must have been
    made with MFD_ALLOW_SEALING where it is not sealed already, as `SharedMemory` is. Raises InputError for
    arguments that cannot be, FabricError when a provider is missing or cannot do what the fabric needs.
    """

    raise_layers: _RaiseLayers
    _engine: _native.Engine

    def __init__(
        self,
        memory_fd: int,
        length: int,
        *,
        transports: Sequence[Transport] = ("mapped", "tcp"),
        nodes: Sequence[str] = ("127.0.0.1",),
        port: int = 0,
        cpus: Sequence[int] = (),
        cuda_device: int | None = None,
        beside: "NativeFabric | None" = None,
        silence_s: float = 2.0,
    ) -> None:
        if not transports or len(set(transports)) < len(transports):
            raise InputError("transports", f"must be different ones, at least one, are {tuple(transports)}")
        for transport in transports:
            if transport != "mapped" and transport not in PROVIDERS:
                known = ", ".join(("mapped", *PROVIDERS))
                raise InputError("transports", f"must be of {known}, has {transport!r}")
        if cuda_device is not None and not {"shm", "tcp"}.isdisjoint(transports):
            raise InputError("transports", f"must be of mapped, efa and verbs for CUDA memory, are {tuple(transports)}")
        strange = set(cpus) - os.sched_getaffinity(0)
        if strange:
            raise InputError("cpus", f"must be of those that this process may use, has {sorted(strange)}")
        if not 0.1 <= silence_s <= 3600:
            raise InputError("silence_s", f"must be 0.1 to 3600 seconds, is {silence_s}")
        places = plan_places(transports, nodes, port)
        setup = _native.Setup(
            control=_control_name(port) if "mapped" in transports else "",
            shm=_control_name(port, "-shm") if "shm" in transports else "",
            watch=plan_watch(transports, nodes, port),
            silence_s=silence_s,
            cpus=list(cpus),
            cuda_device=cuda_device,
            providers=[(PROVIDERS[each], where) for each, where in places.items()],
        )
        self._engine = _native.Engine(memory_fd, length, setup, beside._engine if beside is not None else None)
        self._provider = ", ".join(transports)
        # The model thread's call, without a Python frame around it.
        self.raise_layers = self._engine.raise_layers
        # Also at exit: libfabric's own clean-up must not meet a running owner.
        self._finalizer = weakref.finalize(self, self._engine.close)

    def __repr__(self) -> str:
        if not self._finalizer.alive:
            return f"NativeFabric({self._provider!r}, closed)"
        counts = self.statistics()
        return (
            f"NativeFabric({self._provider!r}, {counts.num_peers_now} peers, {counts.num_transfers_now} transfers, "
            f"{counts.num_counters_now} counters)"
        )

    @property
    def address(self) -> bytes:
        return self._engine.address

    @property
    def event_fd(self) -> int:
        """Take it out of every poll before `close`: the number is given to others afterwards."""
        return self._engine.event_fd

    @property
    def traits(self) -> list[_native.Traits]:
        """Of each libfabric provider that is open here."""
        return self._engine.traits

    def add_peer(self, address: bytes) -> PeerId:
        return PeerId(self._engine.add_peer(address))

    def peer_at(self, address: bytes) -> PeerId | None:
        peer = self._engine.peer_at(address)
        return None if peer is None else PeerId(peer)

    def remove_peer(self, peer: PeerId) -> None:
        self._engine.remove_peer(peer)

    def transport(self, peer: PeerId) -> str:
        return self._engine.transport(peer)

    def num_cuts(self, peer: PeerId, length: int) -> int:
        return self._engine.num_cuts(peer, length)

    def grant(self, peer: PeerId) -> Descriptor:
        addressing, base, length, keys, generation = self._engine.grant(peer)
        return Descriptor(addressing=addressing, base=base, length=length, keys=keys, generation=generation)

    def revoke(self, peer: PeerId) -> bool:
        return self._engine.revoke(peer)

    def connect(self, peer: PeerId, descriptor: Descriptor) -> None:
        self._engine.connect(peer, descriptor)

    def send(self, peer: PeerId, message: bytes) -> None:
        self._engine.send(peer, message)

    def arm(self, imm: Imm, expected: int) -> None:
        self._engine.arm(imm, expected)

    def retarget(self, imm: Imm, expected: int) -> None:
        self._engine.retarget(imm, expected)

    def disarm(self, imm: Imm) -> None:
        self._engine.disarm(imm)

    def open_transfer(self, peer: PeerId, imm: Imm, *, num_pages: int = 0, deadline_s: float = math.inf) -> TransferId:
        return TransferId(self._engine.open_transfer(peer, imm, num_pages, deadline_s))

    def submit_write(self, transfer: TransferId, *, src_offset: int, dst_offset: int, length: int) -> None:
        self._engine.submit_write(transfer, src_offset, dst_offset, length)

    def submit_pages(self, transfer: TransferId, writes: PageWrites) -> None:
        self._engine.submit_pages(transfer, writes)

    def submit_last(self, transfer: TransferId, last: LastWrite | None = None) -> None:
        self._engine.submit_last(transfer, last)

    def submit_program(
        self,
        step: int,
        writes: Sequence[tuple[TransferId, PageWrites]],
        last: Sequence[tuple[TransferId, int, LastWrite]] = (),
    ) -> None:
        self._engine.submit_program(step, writes, last)

    def fail_step(self, step: int) -> dict[TransferId, int]:
        return {TransferId(transfer): num_posted for transfer, num_posted in self._engine.fail_step(step).items()}

    def close_transfer(self, transfer: TransferId) -> int:
        return self._engine.close_transfer(transfer)

    def submit_digest(self, reads: Sequence[PageReads], num_pages: int) -> DigestId:
        return DigestId(self._engine.submit_digest(reads, num_pages))

    def drain_events(self) -> list[Event]:
        events = _Events()
        self._engine.drain(events)
        return events.told

    def statistics(self) -> FabricStatistics:
        return FabricStatistics(provider=self._provider, **self._engine.statistics())

    def num_fragments_dropped(self) -> int:
        """Malformed fragments of messages, and messages given up half received."""
        return self._engine.num_fragments_dropped()

    def owner_cpu_ns(self) -> int:
        """Processor time that the owner thread has used so far."""
        return self._engine.owner_cpu_ns()

    def echo(self, peer: PeerId, imm: Imm, reply: Imm) -> None:
        """From now on the owner answers every arrival of `imm`, which is counted nowhere, with an 8-byte write to the
        connected `peer` that carries `reply`: the wall that `round_trips` plays against."""
        self._engine.echo(peer, imm, reply)

    def round_trips(
        self, peer: PeerId, imm: Imm, reply: Imm, *, count: int, pause_s: float = 0.0
    ) -> NDArray[np.uint64]:
        """8 bytes with `imm` to the connected `peer`, whose `echo` answers with `reply`, from owner to owner; the first
        bytes of both memories are written. -> nanoseconds of each, `[count] uint64`. Raises FabricError after 60 s."""
        return self._engine.round_trips(peer, imm, reply, count, pause_s)

    def close(self) -> None:
        self._finalizer()


def _control_name(port: int, kind: str = "") -> str:
    """Fresh at every start, like the endpoint's own address; known again where that one is."""
    return f"headrace-{os.geteuid()}{kind}-{port or secrets.token_hex(16)}"
