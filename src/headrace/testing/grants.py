"""Who may write into the memory of a loopback endpoint: one key per peer, void for good once it is revoked.

Owns the keys of one endpoint; it knows neither the memory nor what is written. Runs on the thread that steps the
network.
"""

from dataclasses import dataclass

from headrace.fabric.interface import Descriptor, PeerId


@dataclass(slots=True, eq=False)
class Access:
    """What one key opens; a write that has read its header holds on to it."""

    is_live: bool = True


class Grants:
    def __init__(self) -> None:
        self._num_granted = 0
        self._opens: dict[int, Access] = {}
        self._key_of: dict[PeerId, int] = {}

    def grant(self, peer: PeerId, *, key: int, length: int) -> Descriptor:
        self.revoke(peer)
        self._num_granted += 1
        self._opens[key] = Access()
        self._key_of[peer] = key
        return Descriptor(addressing="offset", base=0, length=length, key=key, generation=self._num_granted)

    def revoke(self, peer: PeerId) -> None:
        key = self._key_of.pop(peer, None)
        if key is not None:
            self._opens.pop(key).is_live = False

    def access(self, key: int) -> Access | None:
        return self._opens.get(key)
