"""How an instance's ranks share the KV of a model: which heads each of them holds, and who holds the same. Pure.

`dp` groups hold different requests; the `tp` ranks of a group hold each request's KV together, by heads:

    4 heads, tp 2        rank 0: heads 0 1     rank 1: heads 2 3
    2 heads, tp 4        rank 0: 0   rank 1: 0   rank 2: 1   rank 3: 1       two replica sets: ranks 0 2, ranks 1 3
    a latent (mla)       every rank holds all of it: tp replica sets of one rank each

Ranks are numbered group by group: rank = group * tp + place in the group.
"""

from dataclasses import dataclass, replace

from headrace.errors import InputError
from headrace.kvcache.layout import KVLayout, PoolLayout, require_one_page_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """`kv` is the whole model's, `further` that of layers behind them (a draft model's), shared by the same ranks.
    Raises InputError where `tp` ranks cannot share the heads evenly."""

    kv: KVLayout
    tp: int = 1
    dp: int = 1
    further: tuple[KVLayout, ...] = ()

    def __post_init__(self) -> None:
        for field in ("tp", "dp"):
            if getattr(self, field) < 1:
                raise InputError(field, f"must be at least 1, is {getattr(self, field)}")
        for heads in (kv.num_kv_heads for kv in (self.kv, *self.further)):
            if heads % self.tp and self.tp % heads:
                text = f"must divide the model's {heads} KV heads or be a multiple of them, is {self.tp}"
                raise InputError("tp", text)
        require_one_page_size(self.kv, self.further)

    @property
    def num_ranks(self) -> int:
        return self.dp * self.tp

    @property
    def num_replicas(self) -> int:
        """How many ranks of a group hold the same heads."""
        return max(1, self.tp // self.kv.num_kv_heads)

    @property
    def local(self) -> KVLayout:
        """What each rank holds."""
        return replace(self.kv, num_kv_heads=max(1, self.kv.num_kv_heads // self.tp))

    @property
    def groups(self) -> tuple["Sharding", ...]:
        """Each group of layers by itself."""
        return tuple(replace(self, kv=kv, further=()) for kv in (self.kv, *self.further))

    def pool(self, *, num_pages: int, num_aux_slots: int, aux_slot_bytes: int) -> PoolLayout:
        """The memory of all ranks, `num_pages` on each."""
        local, *further = (group.local for group in self.groups)
        return PoolLayout(
            kv=local,
            further=tuple(further),
            num_pages=num_pages,
            num_aux_slots=num_aux_slots,
            aux_slot_bytes=aux_slot_bytes,
            num_ranks=self.num_ranks,
        )

    def heads_of(self, place: int) -> range:
        """Of the rank at this place in its group."""
        first = place * self.kv.num_kv_heads // self.tp
        return range(first, first + self.local.num_kv_heads)

    def rank(self, group: int, place: int) -> int:
        return group * self.tp + place
