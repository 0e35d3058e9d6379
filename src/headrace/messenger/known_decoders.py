"""A prefiller's decoders: where it may write, under which epoch, and what it remembers of each ticket slot there.

Owned by the prefiller messenger's loop. A decoder is known by its uuid; a restarted one is another. What is
remembered of a slot is the newest generation seen and the answer to repeat: a Prefill that is not newer is never run,
however late a second copy of it arrives. That bounds the tombstones by the number of slots, and they need no clock.
"""

from dataclasses import dataclass, field

from headrace.errors import HandshakeRefused, InputError
from headrace.fabric.interface import Descriptor, Fabric, PeerId
from headrace.messenger.hello import Identity, check_hello, process_of
from headrace.messenger.outcomes import PeerReady, PeerRefused
from headrace.messenger.plan import Plans, Side
from headrace.messenger.process import ProcessName
from headrace.messenger.slots import generation_of, is_newer, slot_of
from headrace.protocol.messages import PROTOCOL_VERSION, Hello, HelloHead, HelloRefused, Ticket, clipped, encode

FORGET_REFUSED_S = 5.0
FORGET_ABSENT_S = 300.0
"""Of a decoder on another host, whose exit nobody tells: without a word, and without a connection. One that is there
after all notices the same, and greets again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tombstone:
    """The newest use of a ticket slot, how it ended, and the answer to repeat."""

    generation: int
    num_posted: int = 0
    num_unknown: int = 0
    answer: bytes | None = None


@dataclass(slots=True, kw_only=True)
class Decoder:
    """One decoder as this prefiller sees it."""

    peer: PeerId
    uuid: str
    address: bytes
    epoch: int
    plans: Plans
    process: ProcessName
    forget_at: float | None = None  # None: it is there, as far as is known
    tombstones: dict[int, Tombstone] = field(default_factory=dict)  # by slot, of this epoch

    def is_new(self, ticket: Ticket) -> bool:
        """Of the current epoch, and newer than everything seen of its slot."""
        if ticket.epoch != self.epoch:
            return False
        seen = self.tombstones.get(slot_of(ticket.imm))
        return seen is None or is_newer(generation_of(ticket.imm), than=seen.generation)

    def remember(
        self, ticket: Ticket, *, num_posted: int = 0, num_unknown: int = 0, answer: bytes | None = None
    ) -> None:
        """Unless a newer ticket has the slot already, or the epoch is over."""
        seen = self.tombstones.get(slot_of(ticket.imm))
        generation = generation_of(ticket.imm)
        if ticket.epoch == self.epoch and (seen is None or not is_newer(seen.generation, than=generation)):
            self.tombstones[slot_of(ticket.imm)] = Tombstone(
                generation=generation, num_posted=num_posted, num_unknown=num_unknown, answer=answer
            )

    def remembered(self, ticket: Ticket) -> Tombstone | None:
        """What is known of exactly this ticket."""
        seen = self.tombstones.get(slot_of(ticket.imm))
        is_it = seen is not None and ticket.epoch == self.epoch and seen.generation == generation_of(ticket.imm)
        return seen if is_it else None


class KnownDecoders:
    def __init__(self, fabric: Fabric, identity: Identity) -> None:
        self._fabric = fabric
        self._identity = identity
        self._by_uuid: dict[str, Decoder] = {}
        self._refused: dict[PeerId, tuple[bytes, float]] = {}  # its address, when to forget it

    def get(self, uuid: str) -> Decoder | None:
        return self._by_uuid.get(uuid)

    def of_peer(self, peer: PeerId) -> Decoder | None:
        return next((decoder for decoder in self._by_uuid.values() if decoder.peer == peer), None)

    def replaced_by(self, hello: Hello) -> Decoder | None:
        """The decoder that was where the sender is now: its port was free, so it is gone. None too when the sender
        started before it: then this Hello is late, and its sender is the one that was replaced. Raises InputError when
        its address is none."""
        peer, sender = self._fabric.peer_at(hello.address), process_of(hello)
        decoder = None if peer is None else self.of_peer(peer)
        if decoder is None or decoder.uuid == hello.sender:
            return None
        is_late = sender.host == decoder.process.host and sender.started < decoder.process.started
        return None if is_late else decoder

    def on_hello(self, hello: Hello, now: float) -> tuple[Decoder, PeerReady] | PeerRefused | None:
        """A Hello of a new decoder, or of a new epoch, is adopted and answered: (decoder, PeerReady). A repeated one
        is answered again (None), an older one is not. One that differs is refused.

        Raises InputError or FabricError, and nothing has changed, when its address is no address or somebody else's.
        """
        known = self._by_uuid.get(hello.sender)
        if known is not None and hello.epoch <= known.epoch:
            if hello.epoch == known.epoch:
                self._answer(known)
            return None
        peer = self._peer_of(hello, known)
        try:
            side = check_hello(self._identity, hello)
            self._connect(peer, hello, side)
        except HandshakeRefused as refusal:
            return self._refuse(hello, refusal, peer, now)
        self._refused.pop(peer, None)
        plans = Plans(self._identity.side, side)
        if known is None:
            known = self._by_uuid[hello.sender] = Decoder(
                peer=peer,
                uuid=hello.sender,
                address=hello.address,
                epoch=hello.epoch,
                plans=plans,
                process=process_of(hello),
            )
        known.epoch = hello.epoch
        known.forget_at = None
        known.plans = plans
        known.tombstones.clear()
        self._answer(known)
        return known, PeerReady(peer=known.peer, uuid=known.uuid, process=known.process)

    def refuse_version(self, head: HelloHead, now: float) -> PeerRefused | None:
        """A Hello that only its head is known of. Raises as `on_hello` does."""
        peer = self._peer_of(head, self._by_uuid.get(head.sender))
        return self._refuse(head, HandshakeRefused("protocol", PROTOCOL_VERSION, head.protocol), peer, now)

    def _peer_of(self, hello: Hello | HelloHead, known: Decoder | None) -> PeerId:
        if known is not None:
            return known.peer
        there = self._fabric.peer_at(hello.address)
        if there is not None and there in self._refused:
            if self._refused[there][0] == hello.address:
                return there
            self._forget_refused(there)  # its port was free
        return self._fabric.add_peer(hello.address)

    def _connect(self, peer: PeerId, hello: Hello, side: Side) -> None:
        try:
            descriptor = Descriptor.decode(hello.descriptor)
        except InputError as error:
            raise HandshakeRefused("descriptor", str(error), f"{len(hello.descriptor)} bytes") from error
        if descriptor.length < side.pool.total_bytes:
            raise HandshakeRefused("descriptor", f"{side.pool.total_bytes} bytes, as the pool says", descriptor.length)
        try:
            self._fabric.connect(peer, descriptor)
        except InputError as error:  # another addressing mode, or a grant older than the one in use
            raise HandshakeRefused("descriptor", str(error), repr(descriptor.addressing)) from error

    def _answer(self, decoder: Decoder) -> None:
        answer = self._identity.hello(epoch=decoder.epoch, address=self._fabric.address, descriptor=b"")
        self._fabric.send(decoder.peer, encode(answer))

    def _refuse(
        self, hello: Hello | HelloHead, refusal: HandshakeRefused, peer: PeerId, now: float
    ) -> PeerRefused | None:
        is_first = peer not in self._refused
        if hello.sender not in self._by_uuid:  # a decoder that we know stays, in the epoch that it had
            self._refused[peer] = (hello.address, now + FORGET_REFUSED_S)
        answer = HelloRefused(
            sender=self._identity.uuid,
            epoch=hello.epoch,
            address=self._fabric.address,
            field=refusal.field,
            ours=clipped(str(refusal.ours)),
            theirs=clipped(str(refusal.theirs)),
        )
        self._fabric.send(peer, encode(answer))
        return PeerRefused(peer=peer, field=refusal.field, text=str(refusal)) if is_first else None

    def absent(self, peer: PeerId, now: float) -> None:
        """Its connection is gone, or silent."""
        decoder = self.of_peer(peer)
        if decoder is not None and decoder.forget_at is None:
            decoder.forget_at = now + FORGET_ABSENT_S

    def present(self, decoder: Decoder | None) -> None:
        """It was heard."""
        if decoder is not None:
            decoder.forget_at = None

    def long_absent(self, now: float) -> list[Decoder]:
        """To be forgotten, where nothing is under way to them; else they are named again in a while."""
        absent = [d for d in self._by_uuid.values() if d.forget_at is not None and d.forget_at <= now]
        for decoder in absent:
            decoder.forget_at = now + FORGET_ABSENT_S
        return absent

    def forget(self, decoder: Decoder) -> None:
        """Its process has exited, or it is absent and reads nothing."""
        self._fabric.remove_peer(decoder.peer)
        del self._by_uuid[decoder.uuid]

    def forget_refused(self, now: float) -> None:
        """Peers that were told why, some time ago."""
        for peer in [peer for peer, (_, at) in self._refused.items() if at <= now]:
            self._forget_refused(peer)

    def _forget_refused(self, peer: PeerId) -> None:
        self._fabric.remove_peer(peer)
        del self._refused[peer]

    def next_forget(self) -> float | None:
        absent = [decoder.forget_at for decoder in self._by_uuid.values() if decoder.forget_at is not None]
        return min([*absent, *(at for _, at in self._refused.values())], default=None)

    def __len__(self) -> int:
        return len(self._by_uuid)

    def __repr__(self) -> str:
        return f"KnownDecoders({len(self._by_uuid)})"
