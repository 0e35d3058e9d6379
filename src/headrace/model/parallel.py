"""How a model is computed by several ranks: whom a rank adds up its results with, and products that are shared so.

Owns nothing. Of each pair of products, the first is cut by outputs (heads, columns of an MLP), the second by inputs:
each rank has a part of every result, and the sum is everybody's. One rank sums nothing and calls nobody. Runs on the
model thread.
"""

from dataclasses import dataclass, field

import torch

from headrace.model.ops import Linear, Ops
from headrace.model.ranks import OneRank, Ranks
from headrace.model.shape import ModelShape
from headrace.model.shard import Shard
from headrace.model.tensors import Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """This rank among those of its `group`, which compute the same tokens, and among all of the instance."""

    group: Ranks = field(default_factory=OneRank)
    everyone: Ranks = field(default_factory=OneRank)

    @property
    def shard(self) -> Shard:
        return Shard(tp=self.group.size, dp=self.everyone.size // self.group.size, rank=self.everyone.rank)


ALONE = Parallel()


def summed(linear: Linear, ranks: Ranks) -> Linear:
    """Whose inputs are cut over `ranks`: the sum of their results."""
    return linear if ranks.size == 1 else SummedLinear(linear, ranks)


@dataclass(frozen=True, slots=True)
class SummedLinear:
    linear: Linear
    ranks: Ranks

    def apply(self, inputs: torch.Tensor) -> torch.Tensor:
        out = self.linear.apply(inputs)
        self.ranks.all_reduce(out)
        return out

    def add_to(self, x: torch.Tensor, inputs: torch.Tensor) -> None:
        x += self.apply(inputs)


def packed_head(shape: ModelShape, embedding: torch.Tensor, tensor: Tensors, ops: Ops, parallel: Parallel) -> Linear:
    """The product that gives logits, cut by vocabulary and gathered again: it is the largest weight of a small model,
    and every rank of a group has all logits then, whichever of them draws the tokens. `embedding` is whole, `tensor`
    yields the rank's part."""
    rows = parallel.shard.part(shape.vocab_size, shape.head_size)
    linear = ops.linear(embedding[rows.start : rows.stop] if shape.tie_word_embeddings else tensor("lm_head.weight"))
    return linear if parallel.group.size == 1 else GatheredLinear(linear, parallel.group, shape.vocab_size)


@dataclass(frozen=True, slots=True)
class GatheredLinear:
    """Whose outputs are cut over `ranks`, as `Shard.part` cuts `num_outputs` of them."""

    linear: Linear
    ranks: Ranks
    num_outputs: int

    def apply(self, inputs: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(inputs), self.num_outputs)
        for place, part in enumerate(self.ranks.all_gather(self.linear.apply(inputs))):
            columns = Shard(tp=self.ranks.size, rank=place).part(self.num_outputs, part.shape[1])
            out[:, columns.start : columns.stop] = part
        return out

    def add_to(self, x: torch.Tensor, inputs: torch.Tensor) -> None:
        x += self.apply(inputs)
