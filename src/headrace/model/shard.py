"""Which part of a model each rank of an instance computes, and so holds. Pure: deployments are counted with it.

A rank's model is a smaller model: a `ModelShape` of fewer heads, a narrower MLP, fewer experts. What it holds of a
tensor follows from what that tensor is in the smaller model: where the two differ along an axis, its part of it, and
where they do not, all of it. So a family says once what its tensors are, and need not say how they are cut.

    4 heads over 2 ranks          [0 1] [2 3]              equal parts, by place in the group
    2 KV heads over 4 ranks       [0] [0] [1] [1]          fewer than ranks: each held by several
    7 rows of the head, 2 ranks   [0 1 2 3] [3 4 5 6]      no equal parts: the last ones overlap
    8 experts, 2 groups of 2      [0 1] [2 3] [4 5] [6 7]  over all ranks, whatever their group

Attention, dense MLP and head are cut within a group (`tp`), experts over all ranks (`dp * tp`). The embedding is on
every rank, whole: a row of it is looked up for each token, and to look it up elsewhere costs a sum over ranks.
"""

from dataclasses import dataclass, replace

from headrace.errors import InputError
from headrace.kvcache.sharding import Sharding
from headrace.model.expert_fields import Experts
from headrace.model.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The part of `rank` = group * tp + place, of dp * tp ranks."""

    tp: int = 1
    dp: int = 1
    rank: int = 0

    @property
    def num_ranks(self) -> int:
        return self.dp * self.tp

    @property
    def group(self) -> int:
        return self.rank // self.tp

    @property
    def place(self) -> int:
        """In the rank's group."""
        return self.rank % self.tp

    def of(self, shape: ModelShape) -> ModelShape:
        """What the rank computes of the whole `shape`. Raises InputError where the ranks cannot share it evenly."""
        if self.num_ranks == 1:
            return shape
        kv = Sharding(kv=shape.kv_layout(page_size=1, dtype="bf16"), tp=self.tp, dp=self.dp)
        return replace(
            shape,
            num_heads=_even(self.tp, shape.num_heads, "attention heads"),
            num_kv_heads=kv.local.num_kv_heads,
            intermediate_size=_even(self.tp, shape.intermediate_size, "columns of its MLP (intermediate_size)"),
            head_rows=-(-shape.vocab_size // self.tp),
            experts=shape.experts and self.experts(shape.experts),
        )

    def experts(self, experts: Experts) -> Experts:
        """The rank's part of a mixture. Raises InputError likewise."""
        size = _even(self.num_ranks, experts.num_experts, "experts", "tp x dp")
        shared_size = _even(self.tp, experts.shared_size, "columns of its shared experts")
        return replace(experts, held=range(self.rank * size, (self.rank + 1) * size), shared_size=shared_size)

    def part(self, whole: int, size: int) -> range:
        """Of `whole` rows or columns those that the rank has, when it has `size` of them."""
        num_parts = -(-whole // size)  # as many as ranks of the group, or fewer, and then several have the same
        begin = min(self.place * num_parts // self.tp * size, whole - size)
        return range(begin, begin + size)


def _even(num_ranks: int, whole: int, of_what: str, number: str = "tp") -> int:
    if whole % num_ranks:
        raise InputError(number, f"must divide the model's {whole} {of_what}, is {num_ranks}")
    return whole // num_ranks
