"""The handshake's content: who we are, and what must be equal before a byte is written. Owns no state."""

import secrets
from dataclasses import dataclass, replace

from headrace.errors import HandshakeRefused, InputError
from headrace.kvcache.layout import KVLayout, PoolLayout
from headrace.kvcache.sharding import Sharding
from headrace.messenger.plan import Side
from headrace.messenger.process import ProcessName
from headrace.protocol.messages import (
    MAX_NAME,
    PROTOCOL_VERSION,
    FabricRole,
    Hello,
    LayersShape,
    PoolShape,
    is_name,
)

LAYOUT = "HND-KV"
"""[num_pages, num_kv_heads, 2, page_size, head_dim] per layer: K and V of a head adjacent (DESIGN section 3). Of kind
mla: [num_pages, page_size, head_dim]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """One instance; the process is that of its lead. The uuid is drawn at its start: a restarted one is somebody else.
    Raises InputError where the pool is not that of the sharding."""

    uuid: str
    role: FabricRole
    fingerprint: str
    sharding: Sharding
    pool: PoolLayout
    process: ProcessName

    def __post_init__(self) -> None:
        if not is_name(self.fingerprint):
            raise InputError("fingerprint", f"must be at most {MAX_NAME} characters of valid Unicode")
        if self.role == "prefiller" and self.sharding.dp != 1:
            raise InputError("dp", f"must be 1 of a prefiller: all its ranks compute a prompt, is {self.sharding.dp}")
        Side(sharding=self.sharding, pool=self.pool)

    @classmethod
    def of_this_process(cls, *, role: FabricRole, fingerprint: str, sharding: Sharding, pool: PoolLayout) -> "Identity":
        return cls(
            uuid=secrets.token_hex(16),
            role=role,
            fingerprint=fingerprint,
            sharding=sharding,
            pool=pool,
            process=ProcessName.own(),
        )

    @property
    def side(self) -> Side:
        return Side(sharding=self.sharding, pool=self.pool)

    def hello(self, *, epoch: int, address: bytes, descriptor: bytes) -> Hello:
        return Hello(
            sender=self.uuid,
            role=self.role,
            protocol=PROTOCOL_VERSION,
            epoch=epoch,
            fingerprint=self.fingerprint,
            layout=LAYOUT,
            pool=PoolShape(
                layers=tuple(_layers_shape(group.kv) for group in self.sharding.groups),
                tp=self.sharding.tp,
                dp=self.sharding.dp,
                num_pages=self.pool.num_pages,
                num_aux_slots=self.pool.num_aux_slots,
                aux_slot_bytes=self.pool.aux_slot_bytes,
            ),
            address=address,
            descriptor=descriptor,
            host=self.process.host,
            pid=self.process.pid,
            started=self.process.started,
        )


def _layers_shape(kv: KVLayout) -> LayersShape:
    return LayersShape(
        kind=kv.kind,
        num_layers=kv.num_layers,
        num_kv_heads=kv.num_kv_heads,
        page_size=kv.page_size,
        head_dim=kv.head_dim,
        dtype=kv.dtype,
    )


def process_of(hello: Hello) -> ProcessName:
    return ProcessName(host=hello.host, pid=hello.pid, started=hello.started)


def check_hello(ours: Identity, theirs: Hello) -> Side:
    """-> the peer's side. Raises HandshakeRefused naming the first field that differs, or cannot be."""
    groups, shape = ours.sharding.groups, theirs.pool
    other_role: FabricRole = "decoder" if ours.role == "prefiller" else "prefiller"
    must_be_equal: list[tuple[str, object, object]] = [
        ("protocol", PROTOCOL_VERSION, theirs.protocol),
        ("role", other_role, theirs.role),
        ("fingerprint", ours.fingerprint, theirs.fingerprint),
        ("layout", LAYOUT, theirs.layout),
        ("layers", len(groups), len(shape.layers)),
    ]
    for group, layers in zip(groups, shape.layers, strict=False):
        mine = _layers_shape(group.kv)
        must_be_equal += [(field, getattr(mine, field), getattr(layers, field)) for field in mine.__struct_fields__]
    if theirs.role == "prefiller":
        must_be_equal.append(("dp", 1, shape.dp))
    for field, mine_is, other in must_be_equal:
        if mine_is != other:
            raise HandshakeRefused(field, mine_is, other)
    try:
        sharding = replace(ours.sharding, tp=shape.tp, dp=shape.dp)  # of the same heads: they were compared
    except InputError as error:
        raise HandshakeRefused(error.field, str(error), shape.tp) from error
    pool = sharding.pool(
        num_pages=shape.num_pages, num_aux_slots=shape.num_aux_slots, aux_slot_bytes=shape.aux_slot_bytes
    )
    return Side(sharding=sharding, pool=pool)
