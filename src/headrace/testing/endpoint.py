"""The side that an endpoint turns to the network, and what the key to its memory opens.

Owns no state: `network` and the flights know an endpoint by this and nothing else.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.fabric.interface import Imm, PeerId


@dataclass(slots=True, kw_only=True, eq=False)
class Access:
    """What one key opens; a write that has read its header holds on to it."""

    peer: PeerId
    is_live: bool = True
    holder: "Endpoint | None" = None  # who has to let go before it ends; nobody where it ends at once
    is_withdrawn: bool = False  # the holder is to be told


class Endpoint(Protocol):
    """What messages and writes find."""

    memory: NDArray[np.uint8]

    @property
    def is_gone(self) -> bool:
        """Closed or killed; nothing reaches it any more."""
        ...

    def access(self, key: int) -> Access | None:
        """What `key` opens now."""
        ...

    def hold(self, key: int, holder: "Endpoint") -> None:
        """`holder` writes here with `key` from now on."""
        ...

    def arrive(self, imm: Imm) -> None: ...

    def receive(self, message: bytes) -> None: ...

    def vanish(self) -> None:
        """Be gone, untold, from one moment to the next."""
        ...

    def peer_named(self, address: bytes) -> PeerId | None:
        """Whom it knows by this address; nobody once it is gone."""
        ...

    def lose(self, peer: PeerId) -> None:
        """The connection to `peer` broke."""
        ...

    def miss(self, peer: PeerId) -> None:
        """`peer` was not heard for too long."""
        ...

    def hear(self, peer: PeerId) -> None:
        """`peer` beats."""
        ...
