"""Who may write into the memory of a loopback endpoint: keys, void for good once the access of their peer has ended.

Owns the keys of one endpoint; it knows neither the memory nor what is written. Runs on the thread that steps the
network. Where access ends when its holder lets go:

    granted --connect--> held --revoke--> withdrawn --its holder is told, or gone--> ended, and the owner is told
       '------revoke---------------------------------------------------------------> ended
"""

from collections.abc import Callable
from functools import partial

from headrace.fabric.interface import Descriptor, PeerId
from headrace.testing.endpoint import Access, Endpoint
from headrace.testing.network import LoopbackNetwork


class Grants:
    """`revoked(peer)` is called when the access has ended of which `revoke` said that it had not."""

    def __init__(self, network: LoopbackNetwork, owner: Endpoint, revoked: Callable[[PeerId], None]) -> None:
        self._network, self._owner, self._revoked = network, owner, revoked
        self._num_granted = 0
        self._opens: dict[int, Access] = {}

    def grant(self, peer: PeerId, *, key: int, length: int) -> Descriptor:
        self.revoke(peer)
        self._num_granted += 1
        self._opens[key] = Access(peer=peer)
        return Descriptor(
            addressing="offset" if self._network.revocation == "at once" else "mapped",
            base=0,
            length=length,
            keys=(key,),
            generation=self._num_granted,
        )

    def hold(self, key: int, holder: Endpoint) -> None:
        """`holder` has connected with `key`, which may be void."""
        access = self._opens.get(key)
        if access is not None and self._network.revocation == "when let go":
            access.holder = holder

    def revoke(self, peer: PeerId) -> bool:
        """-> whether the peer has no access left."""
        for key in self._keys_of(peer):
            access = self._opens[key]
            if access.is_withdrawn:
                continue
            if access.holder is None or access.holder.is_gone:
                self._end(key)
            else:
                access.is_withdrawn = True
                self._network.schedule(partial(self._let_go, key), at=access.holder)
        return not self._keys_of(peer)

    def access(self, key: int) -> Access | None:
        return self._opens.get(key)

    def _keys_of(self, peer: PeerId) -> list[int]:
        return [key for key, access in self._opens.items() if access.peer == peer]

    def _end(self, key: int) -> PeerId:
        access = self._opens.pop(key)
        access.is_live = False
        return access.peer

    def _let_go(self, key: int) -> None:
        peer = self._end(key)
        if not self._keys_of(peer):
            self._network.schedule(partial(self._tell_unless_granted_anew, peer), at=self._owner)

    def _tell_unless_granted_anew(self, peer: PeerId) -> None:
        if not self._keys_of(peer):
            self._revoked(peer)
