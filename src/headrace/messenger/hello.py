"""The handshake's content: who we are, and what must be equal before a byte is written. Owns no state."""

import secrets
from dataclasses import dataclass

from headrace.errors import HandshakeRefused, InputError
from headrace.kvcache.layout import PoolLayout
from headrace.messenger.plan import Sharding
from headrace.messenger.process import ProcessName
from headrace.protocol.messages import MAX_NAME, PROTOCOL_VERSION, FabricRole, Hello, PoolShape, is_name

LAYOUT = "HND-KV"
"""[num_pages, num_kv_heads, 2, page_size, head_dim] per layer: K and V of a head adjacent (DESIGN section 3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """One process. The uuid is drawn at its start: a restarted process is somebody else."""

    uuid: str
    role: FabricRole
    fingerprint: str
    pool: PoolLayout
    num_ranks: int
    process: ProcessName

    def __post_init__(self) -> None:
        if not is_name(self.fingerprint):
            raise InputError("fingerprint", f"must be at most {MAX_NAME} characters of valid Unicode")

    @classmethod
    def of_this_process(cls, *, role: FabricRole, fingerprint: str, pool: PoolLayout) -> "Identity":
        return cls(
            uuid=secrets.token_hex(16),
            role=role,
            fingerprint=fingerprint,
            pool=pool,
            num_ranks=1,
            process=ProcessName.own(),
        )

    def require_one_rank(self) -> None:
        """Instances of several ranks come later. Raises InputError."""
        if self.num_ranks != 1:
            raise InputError("num_ranks", f"must be 1 (instances of several ranks come later), is {self.num_ranks}")

    @property
    def sharding(self) -> Sharding:
        return Sharding(pool=self.pool, num_ranks=self.num_ranks)

    def hello(self, *, epoch: int, address: bytes, descriptor: bytes) -> Hello:
        kv = self.pool.kv
        return Hello(
            sender=self.uuid,
            role=self.role,
            protocol=PROTOCOL_VERSION,
            epoch=epoch,
            fingerprint=self.fingerprint,
            layout=LAYOUT,
            pool=PoolShape(
                num_layers=kv.num_layers,
                num_kv_heads=kv.num_kv_heads,
                page_size=kv.page_size,
                head_dim=kv.head_dim,
                dtype=kv.dtype,
                num_pages=self.pool.num_pages,
                num_aux_slots=self.pool.num_aux_slots,
                aux_slot_bytes=self.pool.aux_slot_bytes,
                num_ranks=self.num_ranks,
            ),
            address=address,
            descriptor=descriptor,
            host=self.process.host,
            pid=self.process.pid,
            started=self.process.started,
        )


def process_of(hello: Hello) -> ProcessName:
    return ProcessName(host=hello.host, pid=hello.pid, started=hello.started)


def check_hello(ours: Identity, theirs: Hello) -> PoolLayout:
    """-> the peer's pool. Raises HandshakeRefused naming the first field that differs."""
    kv, shape = ours.pool.kv, theirs.pool
    other_role: FabricRole = "decoder" if ours.role == "prefiller" else "prefiller"
    must_be_equal: tuple[tuple[str, object, object], ...] = (
        ("protocol", PROTOCOL_VERSION, theirs.protocol),
        ("role", other_role, theirs.role),
        ("fingerprint", ours.fingerprint, theirs.fingerprint),
        ("layout", LAYOUT, theirs.layout),
        ("dtype", kv.dtype, shape.dtype),
        ("page_size", kv.page_size, shape.page_size),
        ("num_layers", kv.num_layers, shape.num_layers),
        ("num_kv_heads", kv.num_kv_heads, shape.num_kv_heads),
        ("head_dim", kv.head_dim, shape.head_dim),
        ("num_ranks", ours.num_ranks, shape.num_ranks),
    )
    for field, mine, other in must_be_equal:
        if mine != other:
            raise HandshakeRefused(field, mine, other)
    return PoolLayout(
        kv=kv,  # all of it was compared
        num_pages=shape.num_pages,
        num_aux_slots=shape.num_aux_slots,
        aux_slot_bytes=shape.aux_slot_bytes,
    )
