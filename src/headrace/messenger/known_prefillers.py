"""A decoder's prefillers: who may write here, under which epoch. Owned by the decoder messenger's loop.

    greet      add the peer, grant it access, send Hello{epoch 1}; repeated until it is answered
    ready      its Hello of this epoch came back: tickets may be opened there
    revoke     take the access away; once that has ended (nothing of it lands any more): epoch + 1, grant and greet anew
    forget     it has exited, or was greeted in vain for minutes: revoke, and nothing more

No ticket is opened between a revoke and the answer to its Hello, so a peer that hangs costs nothing but its own use;
where its access ends only when it lets go of our memory, also the pages of the tickets that it had.
"""

from dataclasses import dataclass
from typing import Literal

from headrace.errors import HandshakeRefused
from headrace.fabric.interface import Fabric, PeerId
from headrace.messenger.hello import Identity, check_hello, process_of
from headrace.messenger.outcomes import PeerReady, PeerRefused
from headrace.messenger.plan import Plans
from headrace.protocol.messages import Hello, HelloRefused, encode

FIRST_REPEAT_S = 0.25
LONGEST_REPEAT_S = 4.0
FORGET_S = 300.0
"""Of greetings that nobody answers, or that are refused. Whoever wants the prefiller greets it again."""


@dataclass(slots=True, kw_only=True)
class Prefiller:
    """One prefiller as its decoder sees it."""

    peer: PeerId
    address: bytes
    epoch: int = 0
    hello: bytes = b""  # of this epoch, as sent
    state: Literal["silent", "greeting", "ready", "refused"] = "silent"  # silent: it could not be granted access yet
    is_ending: bool = False  # its access was taken away and may be used all the same: it is granted none anew
    uuid: str | None = None
    plans: Plans | None = None
    repeat_at: float = 0.0
    repeat_after: float = FIRST_REPEAT_S
    forget_at: float | None = None  # None: it was heard


class KnownPrefillers:
    def __init__(self, fabric: Fabric, identity: Identity) -> None:
        self._fabric = fabric
        self._identity = identity
        self._by_peer: dict[PeerId, Prefiller] = {}
        self._last_epoch = 0  # of all that were forgotten: they may remember it, and take no older one

    def greet(self, address: bytes, now: float) -> PeerId:
        """Begin the handshake with the prefiller at this fabric address, as soon as its earlier access has ended.
        Idempotent, but for one that was refused: it may have been started anew, rightly this time, so it is asked
        again. Raises FabricError, and may be called again, when the prefiller cannot be granted access."""
        known = self._by_address(address)
        if known is None:
            known = Prefiller(peer=self._fabric.add_peer(address), address=address, epoch=self._last_epoch)
            self._by_peer[known.peer] = known
        if known.state in ("silent", "refused"):
            self._open_epoch_when_ended(known, now)
        return known.peer

    def replaced_at(self, address: bytes) -> Prefiller | None:
        """The prefiller that was where this address leads: its port was free, so it is gone. Raises InputError when
        it is no address."""
        peer = self._fabric.peer_at(address)
        known = None if peer is None else self._by_peer.get(peer)
        return None if known is None or known.address == address else known

    def _open_epoch_when_ended(self, prefiller: Prefiller, now: float) -> None:
        if prefiller.is_ending:
            prefiller.state = "silent"  # until `access_ended`
        else:
            self._open_epoch(prefiller, now)

    def _open_epoch(self, prefiller: Prefiller, now: float) -> None:
        prefiller.state = "silent"  # whatever comes: no ticket is opened before this epoch's Hello is answered
        prefiller.epoch += 1
        descriptor = self._fabric.grant(prefiller.peer)
        prefiller.hello = encode(
            self._identity.hello(epoch=prefiller.epoch, address=self._fabric.address, descriptor=descriptor.encode())
        )
        prefiller.state = "greeting"
        prefiller.repeat_after = FIRST_REPEAT_S
        prefiller.repeat_at = now + FIRST_REPEAT_S
        prefiller.forget_at = prefiller.forget_at or now + FORGET_S
        self._fabric.send(prefiller.peer, prefiller.hello)

    def answered(self, hello: Hello) -> PeerReady | PeerRefused | None:
        """The prefiller's Hello. None when it answers an older epoch, or again. Where a site fixes its ports, another
        uuid at a known address is a prefiller that was started anew: whatever its predecessor had was revoked before
        this epoch was opened."""
        prefiller = self._by_address(hello.address)
        if prefiller is None or prefiller.state != "greeting" or hello.epoch != prefiller.epoch:
            return None
        try:
            side = check_hello(self._identity, hello)
        except HandshakeRefused as refusal:
            return self._refuse(prefiller, refusal.field, str(refusal))
        prefiller.uuid = hello.sender
        prefiller.plans = Plans(side, self._identity.side)
        prefiller.state = "ready"
        prefiller.forget_at = None
        return PeerReady(peer=prefiller.peer, uuid=hello.sender, process=process_of(hello))

    def refused(self, refusal: HelloRefused) -> PeerRefused | None:
        """The prefiller will not talk to us; it is known by its address, since it never said Hello."""
        prefiller = self._by_address(refusal.address)
        if prefiller is None or prefiller.state != "greeting" or refusal.epoch != prefiller.epoch:
            return None
        text = f"{refusal.field} differs: ours {refusal.theirs}, theirs {refusal.ours}"
        return self._refuse(prefiller, refusal.field, text)

    def _refuse(self, prefiller: Prefiller, field_name: str, text: str) -> PeerRefused:
        prefiller.state = "refused"
        self._take_access(prefiller)
        return PeerRefused(peer=prefiller.peer, field=field_name, text=text)

    def _by_address(self, address: bytes) -> Prefiller | None:
        return next((p for p in self._by_peer.values() if p.address == address), None)

    def get(self, peer: PeerId) -> Prefiller | None:
        return self._by_peer.get(peer)

    def revoke(self, prefiller: Prefiller, now: float) -> bool:
        """Take its access away. True: nothing of the peer lands here any more, and it is greeted under the next epoch.
        False: both are so as soon as the fabric tells Revoked (`access_ended`)."""
        self._take_access(prefiller)
        self._open_epoch_when_ended(prefiller, now)
        return not prefiller.is_ending

    def _take_access(self, prefiller: Prefiller) -> None:
        prefiller.is_ending = not self._fabric.revoke(prefiller.peer)

    def access_ended(self, prefiller: Prefiller, now: float) -> None:
        """What `revoke` had to wait for. One that was refused is greeted when that is asked for."""
        prefiller.is_ending = False
        if prefiller.state == "silent":
            self._open_epoch(prefiller, now)

    def forget(self, prefiller: Prefiller) -> None:
        """Its process has exited, or it has no access. Its writes that are still on their way land nowhere."""
        self._last_epoch = max(self._last_epoch, prefiller.epoch)
        self._fabric.remove_peer(prefiller.peer)
        del self._by_peer[prefiller.peer]

    def send_failed(self, peer: PeerId, now: float) -> None:
        """A message to it was lost; if it was Hello, that is not waited for."""
        prefiller = self._by_peer.get(peer)
        if prefiller is not None:
            prefiller.repeat_at = min(prefiller.repeat_at, now + FIRST_REPEAT_S)

    def repeat_hellos(self, now: float) -> None:
        for prefiller in self._by_peer.values():
            if prefiller.state == "greeting" and prefiller.repeat_at <= now:
                prefiller.repeat_after = min(2 * prefiller.repeat_after, LONGEST_REPEAT_S)
                prefiller.repeat_at = now + prefiller.repeat_after
                self._fabric.send(prefiller.peer, prefiller.hello)

    def unheard(self, now: float) -> list[Prefiller]:
        """To be forgotten: but one whose access is ending may write here still."""
        return [p for p in self._by_peer.values() if p.forget_at is not None and p.forget_at <= now and not p.is_ending]

    def next_due(self) -> float | None:
        repeats = [p.repeat_at for p in self._by_peer.values() if p.state == "greeting"]
        ends = [p.forget_at for p in self._by_peer.values() if p.forget_at is not None and not p.is_ending]
        return min(repeats + ends, default=None)

    @property
    def num_ready(self) -> int:
        return sum(p.state == "ready" for p in self._by_peer.values())

    def __repr__(self) -> str:
        return f"KnownPrefillers({self.num_ready} ready of {len(self._by_peer)})"
