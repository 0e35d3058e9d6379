"""What a config.json says of experts: which layers have them, how many, and how many of them a token chooses. Pure.

Owns the numbers of a mixture, and what is refused of them; `family_fields` says which families have one.
"""

from dataclasses import dataclass
from typing import Literal

from headrace.errors import InputError
from headrace.model.config_fields import Config, count, flag, positive, said


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertGroups:
    """Of `num_groups` equal ones a token first chooses `num_chosen`, then experts among these: those of a group lie on
    one node, and a token travels to few."""

    num_groups: int
    num_chosen: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Instead of one MLP, `layers` have `num_experts` small ones, of which each token goes through the `num_chosen`
    that a router gives the largest shares; `renormalised`: the shares of the chosen sum to one."""

    layers: tuple[int, ...]
    num_experts: int
    num_chosen: int
    intermediate_size: int
    renormalised: bool
    scores: Literal["softmax", "sigmoid"] = "softmax"  # sigmoid: a bias of each expert counts, for the choice alone
    groups: ExpertGroups | None = None  # None: all are chosen among
    scale: float = 1.0  # of the shares, in the end
    shared_size: int = 0  # of one more MLP, that every token goes through; 0: there is none
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


def deepseek_v2_experts(config: Config, num_layers: int) -> Experts:
    is_grouped = config.get("topk_method") == "group_limited_greedy"
    return _deepseek_experts(config, num_layers, "softmax", _groups(config, least=1) if is_grouped else None)


def deepseek_v3_experts(config: Config, num_layers: int) -> Experts:
    # Of a group, its two best experts count.
    return _deepseek_experts(config, num_layers, "sigmoid", _groups(config, least=2))


def _deepseek_experts(
    config: Config, num_layers: int, scores: Literal["softmax", "sigmoid"], groups: ExpertGroups | None
) -> Experts:
    num_experts, num_chosen = count(config, "n_routed_experts"), count(config, "num_experts_per_tok")
    most = num_experts if groups is None else num_experts // groups.num_groups * groups.num_chosen
    if num_chosen > most:
        right = f"at most {most}, the experts that a token may choose among,"
        raise InputError("num_experts_per_tok", f"must be {right} in config.json, is {num_chosen}")
    num_dense, every = count(config, "first_k_dense_replace", least=0), count(config, "moe_layer_freq")
    return Experts(
        layers=tuple(layer for layer in range(num_dense, num_layers) if layer % every == 0),
        num_experts=num_experts,
        num_chosen=num_chosen,
        intermediate_size=count(config, "moe_intermediate_size"),
        renormalised=flag(config, "norm_topk_prob"),
        scores=scores,
        groups=groups,
        scale=positive(config, "routed_scaling_factor"),
        shared_size=count(config, "n_shared_experts") * count(config, "moe_intermediate_size"),
    )


def _groups(config: Config, *, least: int) -> ExpertGroups | None:
    """None where all of them are chosen; otherwise each has at least so many experts."""
    num_experts, num_groups = count(config, "n_routed_experts"), count(config, "n_group")
    num_chosen = count(config, "topk_group")
    if num_chosen > num_groups:
        raise InputError("topk_group", f"must be at most n_group ({num_groups}) in config.json, is {num_chosen}")
    if num_chosen == num_groups:
        return None
    if num_experts % num_groups or num_experts // num_groups < least:
        right = f"cut n_routed_experts ({num_experts}) into equal groups of at least {least}"
        raise InputError("n_group", f"must {right} in config.json, is {num_groups}")
    return ExpertGroups(num_groups=num_groups, num_chosen=num_chosen)


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
