"""A decoder's way to its prefillers: who they are by uuid, and a ticket for a request whose pages are reserved.

Owns the fabric endpoint, the messenger and its pump; knows no engine and no gateway's messages. Runs on the role's
loop. A prefiller is greeted as soon as a gateway names it, so that the first request finds it ready; one that drops out
of the last gateway's list is taken for hung: revoked at once (its tickets fail, its late writes land nowhere), greeted
until it wakes.
"""

import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NewType

from headrace.engine.requests import Admission
from headrace.errors import FabricError, InputError
from headrace.fabric.interface import FabricStatistics, Imm, PeerId
from headrace.fabric.native import NativeFabric
from headrace.kvcache.pages import PagePool
from headrace.messenger.decoder import DecoderMessenger
from headrace.messenger.entries import DecoderOptions, DecoderStatistics
from headrace.messenger.landings import TicketRequest
from headrace.messenger.outcomes import DecoderOutcome, PeerReady
from headrace.messenger.pump import Pump
from headrace.roles.instance import Instance
from headrace.roles.reached import tell_ready

PrefillerUuid = NewType("PrefillerUuid", str)

_log = logging.getLogger(__name__)


class _RoomWatchingPump(Pump[DecoderOutcome]):
    """Tells when pages of tickets that are over come back to the pool: the messenger has no outcome for that."""

    def __init__(
        self,
        messenger: DecoderMessenger,
        fabric: NativeFabric,
        on_outcome: Callable[[DecoderOutcome], None],
        *,
        pools: Sequence[PagePool],
        on_room: Callable[[], None],
    ) -> None:
        super().__init__(messenger, fabric, on_outcome)
        self._pools = pools
        self._on_room = on_room

    def turn(self) -> None:
        before = [pages.capacity for pages in self._pools]
        super().turn()
        if any(pages.capacity > former for pages, former in zip(self._pools, before, strict=True)):
            self._on_room()


class RemotePrefill:
    """`on_outcome`, and `on_room` when pages have come back to the pool, are called on the loop, from within `turn` and
    `run`."""

    def __init__(
        self, instance: Instance, *, on_outcome: Callable[[DecoderOutcome], None], on_room: Callable[[], None]
    ) -> None:
        options = instance.options
        self._instance = instance
        self._fabric = NativeFabric(
            instance.memory.fd, instance.memory.length, transports=options.transports, nodes=options.fabric_hosts
        )
        self._messenger = DecoderMessenger(
            fabric=self._fabric,
            identity=instance.identity,
            pools=instance.pools,
            memory=instance.memory.bytes,
            rng=random.Random(),
            options=DecoderOptions(verify_kv=options.verify_kv),
        )
        self._pump = _RoomWatchingPump(self._messenger, self._fabric, on_outcome, pools=instance.pools, on_room=on_room)
        self._peers: dict[PrefillerUuid, PeerId] = {}  # of those that are named: greeted
        self._named_by: dict[str, Mapping[PrefillerUuid, bytes]] = {}  # by gateway: addresses
        self._out_of_reach: dict[PrefillerUuid, str] = {}  # of those that are named: why, as it was told

    async def run(self) -> None:
        await self._pump.run()

    def turn(self) -> None:
        self._pump.turn()

    def close(self) -> None:
        self._fabric.close()

    def name(self, gateway: str, addresses: Mapping[PrefillerUuid, bytes]) -> None:
        """All prefillers that are alive, as this gateway sees it. Its word alone gives nobody up: a link of its own may
        be down."""
        missing = self._named_by.get(gateway, {}).keys() - addresses.keys()
        self._named_by[gateway] = dict(addresses)
        for prefiller in (missing - self._named().keys()) & self._peers.keys():
            self._messenger.peer_hung(self._peers[prefiller], time.monotonic())
        for prefiller in addresses:
            self._try_greet(prefiller)
        self._drop_unnamed()
        self._pump.poke()

    def gateway_lost(self, gateway: str) -> None:
        """Its list says nothing any more, about nobody."""
        self._named_by.pop(gateway, None)
        self._drop_unnamed()

    def _named(self) -> dict[PrefillerUuid, bytes]:
        named: dict[PrefillerUuid, bytes] = {}
        for addresses in self._named_by.values():
            named |= addresses
        return named

    def _drop_unnamed(self) -> None:
        named = self._named()
        self._peers = {prefiller: peer for prefiller, peer in self._peers.items() if prefiller in named}
        self._out_of_reach = {prefiller: why for prefiller, why in self._out_of_reach.items() if prefiller in named}

    def _try_greet(self, prefiller: PrefillerUuid) -> PeerId | None:
        """None where that cannot be done: a gateway may name any address, and the next request tries again."""
        address = self._named().get(prefiller)
        peer = self._peers.get(prefiller)
        if address is not None and (peer is None or not self._messenger.knows(peer)):
            try:
                self._peers[prefiller] = self._messenger.greet(address, time.monotonic())
            except (InputError, FabricError) as error:
                self._tell_once(prefiller, str(error))
            else:
                self._out_of_reach.pop(prefiller, None)
        return self._peers.get(prefiller)

    def _tell_once(self, prefiller: PrefillerUuid, why: str) -> None:
        """Where there is no transport in common, say, it is the same at every try."""
        if self._out_of_reach.get(prefiller) != why:
            self._out_of_reach[prefiller] = why
            _log.warning("prefiller %s cannot be greeted: %s", prefiller, why)

    def try_fetch(
        self,
        admission: Admission,
        *,
        group: int,
        pages: tuple[int, ...],
        prefiller: PrefillerUuid,
        lease: str,
        remaining_s: float,
    ) -> Imm | None:
        """A ticket for the KV of [h, n-1), into `pages` of the data-parallel `group`. None where there are none, the
        prefiller is not ready, or every slot is in use: then the pages are still the request's."""
        peer = self._try_greet(prefiller) if pages else None
        if peer is None:
            return None
        imm = self._messenger.try_open_ticket(
            TicketRequest(
                request_id=admission.request_id,
                prefiller=peer,
                lease=lease,
                token_ids=admission.token_ids,
                cached_len=admission.cached_len,
                group=group,
                pages=pages,
                hashes=admission.hashes,
                remaining_s=remaining_s,
            ),
            time.monotonic(),
        )
        self._pump.poke()
        return imm

    def cancel(self, imm: Imm) -> None:
        self._messenger.cancel(imm, time.monotonic())
        self._pump.poke()

    def tell_ready(self, ready: PeerReady) -> None:
        tell_ready("prefiller", ready, fabric=self._fabric, instance=self._instance)

    def statistics(self) -> tuple[DecoderStatistics, FabricStatistics]:
        return self._messenger.statistics(), self._fabric.statistics()

    def check(self) -> None:
        self._messenger.check()

    def __repr__(self) -> str:
        return f"RemotePrefill({len(self._peers)} named, {self._messenger!r})"
