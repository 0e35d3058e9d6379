"""What is Qwen3-MoE's alone, against transformers' in fp32: shares, ties, which layers are sparse. `test_llama` has the
rest."""

import pytest
import torch
from llama_oracle import Oracle, require_the_oracles_logits

from headrace.model.expert_fields import Experts
from headrace.model.expert_mlp import ExpertMlp, SoftmaxRouter
from headrace.model.llama import GatedMlp
from headrace.model.torch_ops import TorchGatedLinear, TorchLinear

VARIANT = "Qwen3-MoE: a dense layer among sparse ones"


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"norm_topk_prob": False}, id="shares as they are"),
        pytest.param({"decoder_sparse_step": 2, "mlp_only_layers": []}, id="every second layer"),
        pytest.param({"mlp_only_layers": [0, 1, 2]}, id="no layer"),
        pytest.param({"num_experts_per_tok": 1}, id="one of them"),
        pytest.param({"num_experts_per_tok": 8, "norm_topk_prob": False}, id="all of them"),
    ],
)
def test_each_way_to_mix_gives_the_oracles_logits(changes: dict[str, object]) -> None:
    require_the_oracles_logits(Oracle(VARIANT, **changes))


def test_of_experts_with_equal_shares_the_oracles_are_chosen() -> None:
    oracle = Oracle(VARIANT)
    with torch.no_grad():
        for name, weight in oracle.model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                weight[1:] = weight[0]
    require_the_oracles_logits(oracle)


def test_a_tokens_results_are_added_in_order_of_expert_whichever_it_prefers() -> None:
    def always(value: float) -> GatedMlp:
        gate_up = TorchGatedLinear(torch.zeros(2, 1))
        return GatedMlp(gate_up=gate_up, down=TorchLinear(torch.zeros(1, 1), bias=torch.tensor([value])))

    torch.manual_seed(0)
    router, values, inputs = torch.randn(8, 1), torch.randn(8), torch.tensor([[1.0], [-1.0]])  # of opposite tastes
    mlp = ExpertMlp(
        router=SoftmaxRouter(weight=TorchLinear(router), num_chosen=8, renormalised=False),
        experts=[always(float(value)) for value in values],
    )
    x = torch.zeros(2, 1)
    mlp.add_to(x, inputs)
    parts = (torch.softmax(inputs @ router.T, -1) * values).unbind(-1)
    assert torch.equal(x[:, 0], sum(parts, torch.zeros(2)))
    assert not torch.equal(x[:, 0], sum(reversed(parts), torch.zeros(2)))  # in fp32 the order shows


def test_a_model_knows_its_experts_from_what_transformers_writes() -> None:
    assert Oracle(VARIANT).shape.experts == Experts(
        layers=(0, 2), num_experts=8, num_chosen=3, intermediate_size=24, renormalised=True
    )
