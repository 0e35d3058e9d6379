"""NativeFabric: the Fabric over libfabric, one endpoint and one owner thread in the native module.

Owns the translation between the interface's records and the native module's integers, nothing else: tables, order and
waiting live with the owner thread (native/owner.h). Calls come from any thread. Must not be used across a fork.
"""

import os
import weakref
from collections.abc import Sequence
from typing import Protocol

# Debian's libfabric loads PSM, which would replace the handlers of SIGINT and others as it loads: Ctrl-C would then end
# Python without a KeyboardInterrupt. It reads these names once, so they precede the import.
os.environ.setdefault("IPATH_NO_BACKTRACE", "1")
os.environ.setdefault("HFI_NO_BACKTRACE", "1")

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
    PeerId,
    Reached,
    SendFailed,
    Surplus,
    TransferDone,
    TransferId,
)


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


class NativeFabric:
    """One endpoint of `provider`, bound to the local address `node` (None: the provider's choice) and `port` (0: a
    fresh one, as PROTOCOL wants; a fixed one is for sites whose firewall asks for it), over the first `length` bytes
    of the file `memory_fd`.

    The file is mapped here and again for every grant; the descriptor may be closed afterwards. Raises FabricError
    when the provider is missing or cannot do what the fabric needs.
    """

    raise_layers: _RaiseLayers

    def __init__(
        self,
        memory_fd: int,
        length: int,
        *,
        provider: str = "tcp;ofi_rxm",
        node: str | None = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self._engine = _native.Engine(memory_fd, length, provider, node, port)
        self._provider = self._engine.traits.provider
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
    def traits(self) -> _native.Traits:
        return self._engine.traits

    def add_peer(self, address: bytes) -> PeerId:
        return PeerId(self._engine.add_peer(address))

    def remove_peer(self, peer: PeerId) -> None:
        self._engine.remove_peer(peer)

    def grant(self, peer: PeerId) -> Descriptor:
        virtual, base, length, key, generation = self._engine.grant(peer)
        return Descriptor(
            addressing="virtual" if virtual else "offset", base=base, length=length, key=key, generation=generation
        )

    def revoke(self, peer: PeerId) -> None:
        self._engine.revoke(peer)

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

    def open_transfer(self, peer: PeerId, imm: Imm, *, num_pages: int = 0) -> TransferId:
        return TransferId(self._engine.open_transfer(peer, imm, num_pages))

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

    def close(self) -> None:
        self._finalizer()
