"""An endpoint whose messages and writes a test makes by hand: the other side, honest or not.

`PuppetDecoder` plays a decoder to a real prefiller, `PuppetPrefiller` a prefiller to a real decoder. They keep no
rules: what a messenger does about a peer that breaks them can only be seen with a peer that does.
"""

from collections import Counter
from typing import TypeVar

import msgspec
import numpy as np
from kv_world import LoopbackSite

from headrace.fabric.interface import Descriptor, Imm, LastWrite, MessageReceived, PeerId, Surplus, TransferId
from headrace.kvcache.layout import PoolLayout
from headrace.kvcache.sharding import Sharding
from headrace.messenger.aux import DIGESTS_AT, AuxHeader, aux_bytes
from headrace.messenger.hello import Identity
from headrace.messenger.plan import Side, TransferPlan, plan_transfer
from headrace.messenger.process import ProcessName
from headrace.protocol.messages import AnyMessage, Cancel, FabricRole, Hello, Prefill, Ticket, decode, encode

M = TypeVar("M", bound=AnyMessage)


class Puppet:
    def __init__(self, site: LoopbackSite, layout: PoolLayout, *, role: FabricRole, fingerprint: str = "model") -> None:
        self.site = site
        self.layout = layout
        self.fabric, self.memory = site.endpoint(layout)
        self.identity = Identity(
            uuid=f"{site.rng.getrandbits(128):032x}",
            role=role,
            fingerprint=fingerprint,
            sharding=Sharding(kv=layout.kv),
            pool=layout,
            process=ProcessName(host="loopback", pid=1 + site.rng.getrandbits(20), started=0),
        )
        self.inbox: list[AnyMessage] = []
        self.arrived: Counter[int] = Counter()  # writes, by imm: a puppet arms nothing, so all are surplus

    def say(self, peer: PeerId, message: AnyMessage | bytes) -> None:
        self.fabric.send(peer, message if isinstance(message, bytes) else encode(message))

    def listen(self) -> None:
        for event in self.fabric.drain_events():
            if isinstance(event, MessageReceived):
                self.inbox.append(decode(event.message))
            elif isinstance(event, Surplus):
                self.arrived[event.imm] += 1

    def heard(self, kind: type[M]) -> list[M]:
        """Every message of this kind so far, in order of arrival."""
        self.listen()
        return [message for message in self.inbox if isinstance(message, kind)]


class PuppetDecoder(Puppet):
    """Greets one prefiller and asks it for pages."""

    def __init__(self, site: LoopbackSite, layout: PoolLayout, prefiller_address: bytes) -> None:
        super().__init__(site, layout, role="decoder")
        self.peer = self.fabric.add_peer(prefiller_address)
        self.epoch = 0
        self.num_tickets = 0

    def hello(self, **changes: object) -> Hello:
        """The Hello of the present epoch, with a fresh grant."""
        descriptor = self.fabric.grant(self.peer).encode()
        made = self.identity.hello(epoch=self.epoch, address=self.fabric.address, descriptor=descriptor)
        return changed(made, **changes)

    def greet(self) -> None:
        """Open the next epoch."""
        self.epoch += 1
        self.say(self.peer, self.hello())

    def prefill(self, token_ids: tuple[int, ...], lease: str, **changes: object) -> Prefill:
        """A right Prefill on the next ticket slot (nothing cached), with whatever is to be wrong."""
        num_pages = -(-(len(token_ids) - 1) // self.layout.kv.page_size)
        slot = self.num_tickets % self.layout.num_aux_slots
        generation = 1 + self.num_tickets // self.layout.num_aux_slots
        self.num_tickets += 1
        made = Prefill(
            sender=self.identity.uuid,
            ticket=Ticket(decoder=self.identity.uuid, epoch=self.epoch, imm=generation << 12 | slot),
            request_id="a",
            lease=lease,
            token_ids=token_ids,
            group=0,
            pages=tuple(range(num_pages)),
            aux_slot=slot,
            seed=0,
            remaining_s=30.0,
        )
        return changed(made, **changes)

    def cancel(self, ticket: Ticket) -> None:
        self.say(self.peer, Cancel(sender=self.identity.uuid, ticket=ticket))

    def num_arrivals(self, ticket: Ticket) -> int:
        self.listen()
        return self.arrived[ticket.imm]


class PuppetPrefiller(Puppet):
    """Answers one decoder's Hellos when told to; writes what it is told to."""

    peer: PeerId
    plan: TransferPlan
    descriptor: Descriptor

    def __init__(self, site: LoopbackSite, layout: PoolLayout) -> None:
        super().__init__(site, layout, role="prefiller")
        self.is_met = False

    def hello(self, epoch: int, **changes: object) -> Hello:
        return changed(self.identity.hello(epoch=epoch, address=self.fabric.address, descriptor=b""), **changes)

    def meet(self) -> Hello:
        """Take the decoder's latest Hello; it is answered with `say`."""
        latest = self.heard(Hello)[-1]
        if not self.is_met:
            self.peer = self.fabric.add_peer(latest.address)
            self.is_met = True
        shape = latest.pool
        theirs = PoolLayout(
            kv=self.layout.kv,
            num_pages=shape.num_pages,
            num_aux_slots=shape.num_aux_slots,
            aux_slot_bytes=shape.aux_slot_bytes,
        )
        self.theirs = theirs
        self.plan = plan_transfer(
            self.identity.side, Side(sharding=self.identity.sharding, pool=theirs), group=0, seed=0
        )
        self.fabric.connect(self.peer, Descriptor.decode(latest.descriptor))
        return latest

    def answer(self) -> None:
        asked = self.meet()
        self.say(self.peer, self.hello(asked.epoch))

    def expected(self, prefill: Prefill) -> int:
        return self.plan.num_messages(len(prefill.pages))

    def write(self, prefill: Prefill, num_writes: int) -> TransferId:
        """Some page writes of the ticket, and no more."""
        transfer = self.fabric.open_transfer(self.peer, Imm(prefill.ticket.imm))
        page_bytes, num_layers = self.layout.kv.page_bytes, self.layout.kv.num_layers
        for i in range(num_writes):
            page, layer = prefill.pages[i // num_layers % len(prefill.pages)], i % num_layers
            self.fabric.submit_write(
                transfer, src_offset=0, dst_offset=self.theirs.page_offset(layer, page), length=page_bytes
            )
        self.fabric.submit_last(transfer)
        return transfer

    def write_all(
        self, prefill: Prefill, *, cached_len: int = 0, ticket: Ticket | None = None, num_messages: int | None = None
    ) -> TransferId:
        """Everything, with true digests; the header can be made to lie."""
        num_pages = len(prefill.pages)
        transfer = self.fabric.open_transfer(self.peer, Imm(prefill.ticket.imm), num_pages=num_pages)
        positions = np.arange(num_pages, dtype=np.int64)
        dst_pages = np.array(prefill.pages, dtype=np.int64)
        for route in self.plan.routes:
            self.fabric.submit_pages(
                transfer, route.writes(src_pages=positions, dst_pages=dst_pages, positions=positions)
            )
        src_offset = self.layout.aux_offset(0)
        AuxHeader(
            ticket=ticket or prefill.ticket,
            cached_len=cached_len,
            num_messages=num_messages or self.expected(prefill),
        ).pack_into(self.memory[src_offset : src_offset + self.layout.aux_slot_bytes])
        last = LastWrite(
            src_offset=src_offset,
            dst_offset=self.theirs.aux_offset(prefill.aux_slot),
            length=aux_bytes(num_pages),
            digests_at=DIGESTS_AT,
        )
        self.fabric.submit_last(transfer, last)
        return transfer


def changed(message: M, **changes: object) -> M:
    """The message with some fields set, those of a Hello's pool and of its first layers too (they are named apart)."""
    of_pool, of_kv = (
        {name.removeprefix(prefix): value for name, value in changes.items() if name.startswith(prefix)}
        for prefix in ("pool_", "kv_")
    )
    own = {name: value for name, value in changes.items() if not name.startswith(("pool_", "kv_"))}
    if of_pool or of_kv:
        assert isinstance(message, Hello)
        first, *further = message.pool.layers
        own["pool"] = _replace(message.pool, **({"layers": (_replace(first, **of_kv), *further)} | of_pool))
    return _replace(message, **own)


S = TypeVar("S")


def _replace(struct: S, **changes: object) -> S:
    return msgspec.structs.replace(struct, **changes)  # type: ignore[type-var]
