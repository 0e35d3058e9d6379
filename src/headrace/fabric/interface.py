"""The fabric's verbs and their plain records: what the messenger may ask for, what it is told.

Owns no state. `Fabric` is implemented by `headrace.fabric.native.NativeFabric` (libfabric, an owner thread) and by
`headrace.testing.LoopbackFabric` (in memory, seeded faults). One fabric serves one memory: a single mapped region
with the KV pages of every layer and the aux slots behind them. All offsets are bytes from the start of that memory.

Two endpoints, the descriptor carried between them by their own means (a message, a pipe):

    reader      peer = add_peer(writer's address); descriptor = grant(peer); arm(imm, expected)
    writer      peer = add_peer(reader's address); connect(peer, descriptor); transfer = open_transfer(peer, imm)
                submit_pages(transfer, ...); submit_last(transfer)             -> TransferDone
    reader      -> Reached, when `expected` writes with that imm have landed

Life of a transfer (everything the writer does for one ticket):

    open_transfer        an empty write list towards one peer, one imm on every write of it
    submit_pages         writes that may be posted at once
    submit_program       writes of one forward step, each layer's posted when the layer counter says it is computed
    submit_last          the aux write: posted after everything else of the transfer was posted; ends the list
    close_transfer       or: ends the list early; what was not posted never will be
    TransferDone         its single result: every posted write has completed, so its source pages may be reused
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NewType, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from headrace.errors import InputError

PeerId = NewType("PeerId", int)
TransferId = NewType("TransferId", int)
DigestId = NewType("DigestId", int)
Imm = NewType("Imm", int)

LAYERS_PER_STEP = 1024
"""The layer counter is step * LAYERS_PER_STEP + layers_done (PROTOCOL, "Steps and the layer counter")."""

IMM_SLOT_BITS = 12
"""An imm is generation << IMM_SLOT_BITS | slot: 4,096 counters, 2**20 generations of each."""

MAX_NICS = 4
"""NICs of one domain group."""

Addressing = Literal["offset", "virtual", "mapped", "cuda"]
ADDRESSINGS: tuple[Addressing, ...] = get_args(Addressing)

Indices = NDArray[np.int64]
Digests = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptor:
    """What one peer needs to write into our memory; made by `grant`, void after `revoke`."""

    addressing: Addressing
    base: int
    length: int
    keys: tuple[int, ...]  # one for each NIC that we listen on; the one key of a mapped memory
    generation: int

    _HEAD = struct.Struct("<BQQIB")
    MAX_BYTES: ClassVar[int] = _HEAD.size + 8 * MAX_NICS

    def encode(self) -> bytes:
        addressing = ADDRESSINGS.index(self.addressing)
        head = self._HEAD.pack(addressing, self.base, self.length, self.generation, len(self.keys))
        return head + struct.pack(f"<{len(self.keys)}Q", *self.keys)

    @classmethod
    def decode(cls, wire: bytes) -> "Descriptor":
        """Raises InputError when `wire` is not a descriptor."""
        if len(wire) < cls._HEAD.size:
            raise InputError("descriptor", f"must be at least {cls._HEAD.size} bytes, is {len(wire)}")
        addressing, base, length, generation, num_keys = cls._HEAD.unpack_from(wire)
        if addressing >= len(ADDRESSINGS):
            raise InputError("descriptor", f"must begin with 0 to {len(ADDRESSINGS) - 1}, begins with {addressing}")
        if not 1 <= num_keys <= MAX_NICS:
            raise InputError("descriptor", f"must have 1 to {MAX_NICS} keys, has {num_keys}")
        if len(wire) != cls._HEAD.size + 8 * num_keys:
            raise InputError(
                "descriptor", f"must be {cls._HEAD.size + 8 * num_keys} bytes for {num_keys} keys, is {len(wire)}"
            )
        keys: tuple[int, ...] = struct.unpack_from(f"<{num_keys}Q", wire, cls._HEAD.size)
        return cls(addressing=ADDRESSINGS[addressing], base=base, length=length, keys=keys, generation=generation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """One side of paged work: page i of layer l begins at offset + l * layer_stride + indices[i] * page_stride. Only
    where pages begin must be in the memory: behind layers of another stride the offset may be below 0."""

    offset: int
    layer_stride: int
    page_stride: int
    indices: Indices  # [num_pages] int64


@dataclass(frozen=True, slots=True, kw_only=True)
class PageWrites:
    """One write of `length` bytes per layer in [layer_begin, layer_end) and page, in that order.

    `positions[i]` is the page's place in the ticket's page list. The digest of a page is the sum (mod 2**64) of
    xxh3_64(bytes, seed=message_seed(position, layer, route)) over its messages.
    """

    src: Pages
    dst: Pages
    positions: Indices  # [num_pages] int64
    layer_begin: int
    layer_end: int
    length: int
    route: int = 0

    @property
    def num_writes(self) -> int:
        return len(self.positions) * (self.layer_end - self.layer_begin)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageReads:
    """The local side of PageWrites, for `submit_digest`: the same messages where they landed."""

    pages: Pages
    positions: Indices
    layer_begin: int
    layer_end: int
    length: int
    route: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LastWrite:
    """The aux write. The transfer's digests (8 bytes a page, little-endian) are stored at src_offset + digests_at
    before it is posted, so the memory [src_offset, src_offset + length) belongs to the fabric until TransferDone."""

    src_offset: int
    dst_offset: int
    length: int
    digests_at: int


def message_seed(position: int, layer: int, route: int) -> int:
    """Seed of one message's hash: 32 bits of position, 16 of layer, 16 of route."""
    return position << 32 | layer << 16 | route


# ---- what the fabric tells -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageReceived:
    """A whole message from somebody who knows our address; who, its content must say and prove."""

    message: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SendFailed:
    """A message to `peer` completed in error; it may or may not have arrived."""

    peer: PeerId
    code: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """The armed counter of `imm` stands at its target, told once per arm or retarget."""

    imm: Imm
    arrivals: int
    at_ns: int  # CLOCK_MONOTONIC of the last arrival (of the retarget, if that came later)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surplus:
    """Arrivals beyond the target of an armed counter (`armed`), or on an imm that nobody armed."""

    imm: Imm
    arrivals: int  # total of that imm so far; 1 per event when not armed
    armed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferDone:
    """The single result of a transfer: its list is ended and every posted write has completed or failed.

    `num_failed` of the `num_posted` completed in error (they may have landed or not); code and text are the
    first error's, or those of the bounds check that ended the list; code is 0 when there was none.
    """

    transfer: TransferId
    num_posted: int
    num_failed: int
    complete: bool  # the last write was posted: nothing was given up. It does not say that anything landed
    code: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestsReady:
    """Result of `submit_digest`: `[num_pages] uint64`, by position."""

    digest: DigestId
    digests: Digests


@dataclass(frozen=True, slots=True, kw_only=True)
class Revoked:
    """What `revoke` could not promise at once: from here on no write of `peer` can land in the memory."""

    peer: PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLost:
    """The control connection to `peer` broke: its process is gone, or its host. Told once, until it is there again.
    What was queued to it has failed with this code and text; what was under way ends as its transport says."""

    peer: PeerId
    code: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSilent:
    """No heartbeat of `peer` for a while: stopped, or cut off. Nothing has failed by that."""

    peer: PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerHeard:
    """A peer that was silent beats again, or one on another host that was lost is connected again."""

    peer: PeerId


Event = (
    MessageReceived
    | SendFailed
    | Reached
    | Surplus
    | TransferDone
    | DigestsReady
    | Revoked
    | PeerLost
    | PeerSilent
    | PeerHeard
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricStatistics:
    """Counts since the start, except the ones named `*_now`."""

    provider: str
    num_peers_now: int
    num_transfers_now: int
    num_counters_now: int
    num_writes_posted: int
    num_writes_completed: int
    num_writes_failed: int
    num_bytes_posted: int
    num_arrivals: int
    num_surplus: int
    num_messages_sent: int
    num_messages_received: int


class Fabric(Protocol):
    """One endpoint over one memory. Calls come from any thread and return within one turn of the owner (about
    1 ms); none waits for a peer. An id that is unknown or already done raises InputError."""

    @property
    def address(self) -> bytes:
        """This endpoint's name, fresh at every start; a peer hands it to `add_peer`."""
        ...

    @property
    def event_fd(self) -> int:
        """Readable when `drain_events` has something (an eventfd on the native fabric)."""
        ...

    # peers and access
    def add_peer(self, address: bytes) -> PeerId:
        """Both sides add each other: the reader to grant access, the writer to connect with what was granted. Raises
        InputError when it is no address, or `peer_at` it is one already."""
        ...

    def peer_at(self, address: bytes) -> PeerId | None:
        """Who is reached there. An endpoint that was bound to the port of an earlier one is reached where that one was,
        though their addresses differ. Raises InputError when it is no address."""
        ...

    def remove_peer(self, peer: PeerId) -> None:
        """Revoke, give up everything queued, and forget the peer. Its transfers are told done, with an error where
        writes were outstanding; messages that wait are dropped, and nothing is told of them, nor of the end of its
        access. The caller knows that the source of the writes may be reused (PROTOCOL, "Source pages")."""
        ...

    def transport(self, peer: PeerId) -> str:
        """How bytes travel to and from `peer`: "mapped", or the name of a libfabric provider."""
        ...

    def grant(self, peer: PeerId) -> Descriptor:
        """Give `peer` access of its own to our memory, with a random key. Revokes an earlier one, of whose end nothing
        is told, nor of that of a `revoke` still under way."""
        ...

    def revoke(self, peer: PeerId) -> bool:
        """Take its access away. True: no write of `peer` can land in the memory any more, not even one half received.
        False (a peer of this host that has our memory mapped): that is so once Revoked is told, when the peer has let
        go of the memory or its process has exited; a peer that hangs does neither. Other peers are not disturbed.
        Idempotent."""
        ...

    def connect(self, peer: PeerId, descriptor: Descriptor) -> None:
        """Transfers opened from now on write into the memory of `descriptor`. Transfers opened before are closed."""
        ...

    # messages
    def send(self, peer: PeerId, message: bytes) -> None:
        """Queue a message of 1 byte to 16 MiB; in order per peer, delivered at most once. To a peer that takes none,
        messages wait until it is removed; with more than 64 MiB waiting, the next is told SendFailed (ENOBUFS)."""
        ...

    # imm counters: what arrives here
    def arm(self, imm: Imm, expected: int) -> None:
        """Count arrivals of `imm`; tell Reached at `expected` (>= 1). Must precede the message that names the imm
        to the peer. The slot must not be armed."""
        ...

    def retarget(self, imm: Imm, expected: int) -> None:
        """New target (>= 0) of an armed counter; tells Reached at once when arrivals equal it already, Surplus when
        they are more."""
        ...

    def disarm(self, imm: Imm) -> None:
        """Forget the counter; later arrivals of this imm are Surplus. Idempotent."""
        ...

    # writes
    def open_transfer(self, peer: PeerId, imm: Imm, *, num_pages: int = 0, deadline_s: float = math.inf) -> TransferId:
        """An empty write list to the connected `peer`; `num_pages` digests are summed (0: none). Once `deadline_s` has
        passed, what was not posted never will be: the list ends with ETIMEDOUT."""
        ...

    def submit_write(self, transfer: TransferId, *, src_offset: int, dst_offset: int, length: int) -> None:
        """`length` bytes (0: nothing but an arrival), as one write or, where several NICs share a long one, as
        `num_cuts(peer, length)`: so many arrivals are to be expected. A source beyond our memory raises InputError; a
        destination beyond the peer's ends the list, which TransferDone tells. The same holds for pages, of which each
        is one write whatever its length."""
        ...

    def num_cuts(self, peer: PeerId, length: int) -> int:
        """How many writes a `submit_write` of `length` bytes becomes, from us to `peer` and from `peer` to us."""
        ...

    def submit_pages(self, transfer: TransferId, writes: PageWrites) -> None: ...

    def submit_last(self, transfer: TransferId, last: LastWrite | None = None) -> None:
        """End the list: post `last` after everything before it (None: nothing more comes)."""
        ...

    def submit_program(
        self,
        step: int,
        writes: Sequence[tuple[TransferId, PageWrites]],
        last: Sequence[tuple[TransferId, int, LastWrite]] = (),
    ) -> None:
        """The writes of forward step `step` (rising from call to call). Layer l's are posted when the layer counter
        is at least step * LAYERS_PER_STEP + l + 1; a last write (transfer, num_layers, aux) when it is at least
        step * LAYERS_PER_STEP + num_layers and everything of that transfer was posted."""
        ...

    def raise_layers(self, counter: int) -> None:
        """The model thread's one call per layer. Never waits; the counter only rises."""
        ...

    def fail_step(self, step: int) -> dict[TransferId, int]:
        """Void the program of `step`: the lists of its transfers are closed. -> num_posted of each (none for a step
        without a program)."""
        ...

    def close_transfer(self, transfer: TransferId) -> int:
        """End the list now, dropping what was not posted. -> num_posted, final. Idempotent until TransferDone was
        drained; afterwards InputError."""
        ...

    # digests of local memory
    def submit_digest(self, reads: Sequence[PageReads], num_pages: int) -> DigestId:
        """Hash local messages in slices of at most 1 ms on the owner thread."""
        ...

    # results
    def drain_events(self) -> list[Event]: ...

    def statistics(self) -> FabricStatistics: ...

    def close(self) -> None:
        """End the owner thread and the endpoint. Idempotent; every other call then raises Closed."""
        ...
