"""A decoder's way to its prefillers: who they are by uuid, and a ticket for a request whose pages are reserved.

Owns the fabric endpoint, the messenger and its pump; knows no engine and no gateway's messages. Runs on the role's
loop. A prefiller is greeted as soon as a gateway names it, so that the first request finds it ready; one that drops out
of a gateway's list is taken for hung: revoked at once (its tickets fail, its late writes land nowhere), greeted until
it wakes.
"""

import random
import time
from collections.abc import Callable, Mapping
from typing import NewType

from headrace.engine.requests import Admission
from headrace.fabric.interface import FabricStatistics, Imm, PeerId
from headrace.fabric.native import NativeFabric
from headrace.messenger.decoder import DecoderMessenger
from headrace.messenger.entries import DecoderOptions, DecoderStatistics
from headrace.messenger.landings import TicketRequest
from headrace.messenger.outcomes import DecoderOutcome
from headrace.messenger.pump import Pump
from headrace.roles.instance import Instance

PrefillerUuid = NewType("PrefillerUuid", str)


class RemotePrefill:
    """`on_outcome` is called on the loop, from within `turn` and `run`."""

    def __init__(self, instance: Instance, on_outcome: Callable[[DecoderOutcome], None]) -> None:
        options = instance.options
        self._fabric = NativeFabric(instance.memory.fd, instance.memory.length, node=options.fabric_host)
        self._messenger = DecoderMessenger(
            fabric=self._fabric,
            identity=instance.identity,
            pages=instance.pages,
            memory=instance.memory.bytes,
            rng=random.Random(),
            options=DecoderOptions(verify_kv=options.verify_kv),
        )
        self._pump = Pump(self._messenger, self._fabric, on_outcome)
        self._peers: dict[PrefillerUuid, PeerId] = {}
        self._named_by: dict[str, set[PrefillerUuid]] = {}  # by gateway

    async def run(self) -> None:
        await self._pump.run()

    def turn(self) -> None:
        self._pump.turn()

    def close(self) -> None:
        self._fabric.close()

    def name(self, gateway: str, addresses: Mapping[PrefillerUuid, bytes]) -> None:
        """All prefillers that are alive, as this gateway sees it."""
        now = time.monotonic()
        missing = self._named_by.get(gateway, set()) - addresses.keys()
        for prefiller in missing & self._peers.keys():
            self._messenger.peer_hung(self._peers[prefiller], now)
        self._named_by[gateway] = set(addresses)
        for prefiller, address in addresses.items():
            if prefiller not in self._peers:
                self._peers[prefiller] = self._messenger.greet(address, now)
        self._drop_unnamed()
        self._pump.poke()

    def gateway_lost(self, gateway: str) -> None:
        """Its list says nothing any more, about nobody."""
        self._named_by.pop(gateway, None)
        self._drop_unnamed()

    def _drop_unnamed(self) -> None:
        named = set().union(*self._named_by.values())
        self._peers = {prefiller: peer for prefiller, peer in self._peers.items() if prefiller in named}

    def try_fetch(
        self,
        admission: Admission,
        *,
        pages: tuple[int, ...],
        prefiller: PrefillerUuid,
        lease: str,
        remaining_s: float,
    ) -> Imm | None:
        """A ticket for the KV of [h, n-1), into `pages`. None where there are none, the prefiller is not ready, or
        every slot is in use: then the pages are still the request's."""
        peer = self._peers.get(prefiller)
        if peer is None or not pages:
            return None
        imm = self._messenger.try_open_ticket(
            TicketRequest(
                request_id=admission.request_id,
                prefiller=peer,
                lease=lease,
                token_ids=admission.token_ids,
                cached_len=admission.cached_len,
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

    @property
    def provider(self) -> str:
        return self._fabric.statistics().provider

    @property
    def address(self) -> bytes:
        return self._fabric.address

    def statistics(self) -> tuple[DecoderStatistics, FabricStatistics]:
        return self._messenger.statistics(), self._fabric.statistics()

    def check(self) -> None:
        self._messenger.check()

    def __repr__(self) -> str:
        return f"RemotePrefill({len(self._peers)} named, {self._messenger!r})"
