"""A decoder's prefillers: who may write here, under which epoch. Owned by the decoder messenger's loop.

    greet      add the peer, grant it access, send Hello{epoch 1}; repeated until it is answered
    ready      its Hello of this epoch came back: tickets may be opened there
    revoke     take the access away (nothing of it lands any more), epoch + 1, grant and greet anew
    forget     it has exited: revoke, and nothing more

No ticket is opened between a revoke and the answer to its Hello, so a peer that hangs costs nothing but its own use.
"""

from dataclasses import dataclass
from typing import Literal

from headrace.errors import HandshakeRefused
from headrace.fabric.interface import Fabric, PeerId
from headrace.messenger.hello import Identity, check_hello, process_of
from headrace.messenger.outcomes import PeerReady, PeerRefused
from headrace.messenger.plan import Sharding, TransferPlan, plan_transfer
from headrace.protocol.messages import Hello, HelloRefused, encode

FIRST_REPEAT_S = 0.25
LONGEST_REPEAT_S = 30.0


@dataclass(slots=True, kw_only=True)
class Prefiller:
    """One prefiller as its decoder sees it."""

    peer: PeerId
    address: bytes
    epoch: int
    hello: bytes  # of this epoch, as sent
    state: Literal["greeting", "ready", "refused"] = "greeting"
    uuid: str | None = None
    plan: TransferPlan | None = None
    repeat_at: float = 0.0
    repeat_after: float = FIRST_REPEAT_S


class Prefillers:
    def __init__(self, fabric: Fabric, identity: Identity) -> None:
        self._fabric = fabric
        self._identity = identity
        self._by_peer: dict[PeerId, Prefiller] = {}
        self._by_uuid: dict[str, Prefiller] = {}

    def greet(self, address: bytes, now: float) -> PeerId:
        """Begin the handshake with the prefiller at this fabric address; idempotent."""
        for known in self._by_peer.values():
            if known.address == address:
                return known.peer
        peer = self._fabric.add_peer(address)
        prefiller = Prefiller(peer=peer, address=address, epoch=0, hello=b"")
        self._by_peer[peer] = prefiller
        self._open_epoch(prefiller, now)
        return peer

    def _open_epoch(self, prefiller: Prefiller, now: float) -> None:
        prefiller.epoch += 1
        descriptor = self._fabric.grant(prefiller.peer)
        prefiller.hello = encode(
            self._identity.hello(epoch=prefiller.epoch, address=self._fabric.address, descriptor=descriptor.encode())
        )
        prefiller.state = "greeting"
        prefiller.repeat_after = FIRST_REPEAT_S
        prefiller.repeat_at = now + FIRST_REPEAT_S
        self._fabric.send(prefiller.peer, prefiller.hello)

    def answered(self, hello: Hello) -> PeerReady | PeerRefused | None:
        """The prefiller's Hello. None when it answers an older epoch, or again."""
        prefiller = self._by_uuid.get(hello.sender) or self._by_address(hello.address)
        if prefiller is None or prefiller.state != "greeting" or hello.epoch != prefiller.epoch:
            return None
        if prefiller.uuid not in (None, hello.sender):
            return None  # an address is fresh at every start: this is not whom we greeted
        try:
            pool = check_hello(self._identity, hello)
        except HandshakeRefused as refusal:
            return self._refuse(prefiller, refusal.field, str(refusal))
        prefiller.uuid = hello.sender
        prefiller.plan = plan_transfer(
            Sharding(pool=pool, num_ranks=hello.pool.num_ranks),
            Sharding(pool=self._identity.pool, num_ranks=self._identity.num_ranks),
        )
        prefiller.state = "ready"
        self._by_uuid[hello.sender] = prefiller
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
        self._fabric.revoke(prefiller.peer)
        return PeerRefused(peer=prefiller.peer, field=field_name, text=text)

    def _by_address(self, address: bytes) -> Prefiller | None:
        return next((p for p in self._by_peer.values() if p.address == address), None)

    def get(self, peer: PeerId) -> Prefiller | None:
        return self._by_peer.get(peer)

    def of_uuid(self, uuid: str) -> Prefiller | None:
        return self._by_uuid.get(uuid)

    def revoke(self, prefiller: Prefiller, now: float) -> None:
        """When this returns nothing of the peer lands here any more; it is greeted under the next epoch."""
        self._fabric.revoke(prefiller.peer)
        self._open_epoch(prefiller, now)

    def forget(self, prefiller: Prefiller) -> None:
        """The process has exited. Its writes that are still on their way land nowhere."""
        self._fabric.remove_peer(prefiller.peer)
        del self._by_peer[prefiller.peer]
        if prefiller.uuid is not None:
            del self._by_uuid[prefiller.uuid]

    def repeat_hellos(self, now: float) -> None:
        for prefiller in self._by_peer.values():
            if prefiller.state == "greeting" and prefiller.repeat_at <= now:
                prefiller.repeat_after = min(2 * prefiller.repeat_after, LONGEST_REPEAT_S)
                prefiller.repeat_at = now + prefiller.repeat_after
                self._fabric.send(prefiller.peer, prefiller.hello)

    def next_repeat(self) -> float | None:
        return min((p.repeat_at for p in self._by_peer.values() if p.state == "greeting"), default=None)

    @property
    def num_ready(self) -> int:
        return sum(p.state == "ready" for p in self._by_peer.values())

    def __repr__(self) -> str:
        return f"Prefillers({self.num_ready} ready of {len(self._by_peer)})"
