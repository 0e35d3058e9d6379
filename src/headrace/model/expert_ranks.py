"""A layer's experts, cut over the ranks of an instance: each rank holds a few of them, whole.

Owns who computes which token and how the results come together. Where all ranks have the same tokens (one group), each
computes its experts for all of them, and the results are summed. Where groups have tokens of their own, these travel:

    dispatch   a token's input goes to the ranks of its experts      token 0: experts 1 4     rank 0 holds 0 1 2
    compute    an expert computes all tokens that came for it        token 1: experts 2 5     rank 1 holds 3 4 5
    combine    results return and are added in order of expert, as one rank adds them (decision 0009)

All ranks call in step, those without a token too: others wait for their experts. Runs on the model thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headrace.model.expert_fields import Experts
from headrace.model.expert_mlp import ExpertMlp, Router, by_expert
from headrace.model.llama import Addition, GatedMlp
from headrace.model.parallel import Parallel
from headrace.model.ranks import Ranks


def expert_mlp(router: Router, packed: Sequence[GatedMlp], experts: Experts, parallel: Parallel) -> Addition:
    """`packed` are the rank's own, in order."""
    if parallel.everyone.size == 1:
        return ExpertMlp(router=router, experts=packed)
    if parallel.everyone.size == parallel.group.size:
        return SummedExperts(router=router, packed=packed, experts=experts, ranks=parallel.group)
    return ExchangedExperts(router=router, packed=packed, num_experts=experts.num_experts, parallel=parallel)


@dataclass(frozen=True, slots=True, kw_only=True)
class SummedExperts:
    """For tokens that all ranks have."""

    router: Router
    packed: Sequence[GatedMlp]
    experts: Experts
    ranks: Ranks

    def add_to(self, x: torch.Tensor, inputs: torch.Tensor) -> None:
        added, own = torch.zeros_like(x), self.experts.own
        for expert, tokens, shares in by_expert(self.router.choose(inputs), self.experts.num_experts):
            if expert in own:
                results = self.packed[expert - own.start].apply(inputs[tokens])
                added.index_add_(0, tokens, results.mul_(shares[:, None]))
        self.ranks.all_reduce(added)
        x += added


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangedExperts:
    """For tokens that a group has by itself. Its ranks send a part of them each, and tell each other what became of it:
    no token travels twice."""

    router: Router
    packed: Sequence[GatedMlp]
    num_experts: int
    parallel: Parallel

    def add_to(self, x: torch.Tensor, inputs: torch.Tensor) -> None:
        group, num_tokens = self.parallel.group, len(x)
        begin, end = (place * num_tokens // group.size for place in (group.rank, group.rank + 1))
        self._add_to(x[begin:end], inputs[begin:end])
        if group.size > 1:
            x.copy_(torch.cat(group.all_to_all([x[begin:end]] * group.size)))

    def _add_to(self, x: torch.Tensor, inputs: torch.Tensor) -> None:
        everyone, choice = self.parallel.everyone, self.router.choose(inputs)
        chosen = choice.experts.flatten()
        order = chosen.argsort(stable=True)  # by expert, and so by rank; of an expert, by token
        tokens = order // choice.experts.shape[1]
        counts = chosen.bincount(minlength=self.num_experts)
        of_ranks = counts.view(everyone.size, -1)  # [ranks, experts of each]
        came = everyone.all_to_all(inputs[tokens].split_with_sizes(of_ranks.sum(1).tolist()))
        computed = self._computed(came, everyone.all_to_all(list(of_ranks)))
        results = torch.cat(everyone.all_to_all(computed)).mul_(choice.shares.flatten()[order, None])
        sizes = counts.tolist()
        for own, values in zip(tokens.split_with_sizes(sizes), results.split_with_sizes(sizes), strict=True):
            x.index_add_(0, own, values)

    def _computed(self, came: Sequence[torch.Tensor], counts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Of the inputs that came from each rank, `[n, C] dtype`, so many for each expert -> results `[n, C] fp32`."""
        inputs, numbers = torch.cat(list(came)), torch.arange(len(self.packed))
        experts = torch.cat([numbers.repeat_interleave(count) for count in counts])
        results = torch.empty(inputs.shape)
        places = experts.argsort(stable=True).split_with_sizes(experts.bincount(minlength=len(numbers)).tolist())
        for expert, own in zip(self.packed, places, strict=True):
            if len(own):
                results[own] = expert.apply(inputs[own])
        return list(results.split_with_sizes([len(part) for part in came]))
