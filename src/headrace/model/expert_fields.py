"""What a config.json says of experts: which layers have them, how many, and how many of them a token chooses. Pure.

Owns the numbers of a mixture, and what is refused of them; `family_fields` says which families have one.
"""

from dataclasses import dataclass

from headrace.errors import InputError
from headrace.model.config_fields import Config, count, flag, said


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Instead of one MLP, `layers` have `num_experts` small ones, of which each token goes through the `num_chosen`
    that a router gives the largest shares; `renormalised`: the shares of the chosen sum to one."""

    layers: tuple[int, ...]
    num_experts: int
    num_chosen: int
    intermediate_size: int
    renormalised: bool
    held: range | None = None  # by the rank whose part this is; None: all

    @property
    def own(self) -> range:
        return self.held or range(self.num_experts)


def experts(config: Config, num_layers: int) -> Experts:
    num_experts, num_chosen = _num_experts(config), count(config, "num_experts_per_tok")
    if num_chosen > num_experts:
        right = f"at most num_experts ({num_experts})"
        raise InputError("num_experts_per_tok", f"must be {right} in config.json, is {num_chosen}")
    return Experts(
        layers=_layers(config, num_layers),
        num_experts=num_experts,
        num_chosen=num_chosen,
        intermediate_size=count(config, "moe_intermediate_size"),
        renormalised=flag(config, "norm_topk_prob"),
    )


def _num_experts(config: Config) -> int:
    """Published ones say num_experts; what transformers 5 writes says num_local_experts."""
    fields = [field for field in ("num_experts", "num_local_experts") if config.get(field) is not None]
    found = {field: count(config, field) for field in fields or ["num_experts"]}
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{field} {number}" for field, number in found.items())
        raise InputError("num_experts", f"must be one number in config.json, is {listed}")
    return next(iter(found.values()))


def _layers(config: Config, num_layers: int) -> tuple[int, ...]:
    """Every so many, counted from one, without those that are named."""
    every, dense = count(config, "decoder_sparse_step"), config.get("mlp_only_layers")
    if not isinstance(dense, list) or not all(type(layer) is int and 0 <= layer < num_layers for layer in dense):
        right = f"a list of layers in 0..{num_layers - 1}"
        raise InputError("mlp_only_layers", f"must be {right} in config.json, {said(dense)}")
    return tuple(layer for layer in range(num_layers) if (layer + 1) % every == 0 and layer not in dense)
