"""What is DeepSeek's alone, against transformers' in fp32: latents, turned parts, ways to choose experts, layers that
nothing reads. `test_llama` has the rest."""

from typing import Any

import pytest
from llama_oracle import Oracle, require_the_oracles_logits

V2 = "DeepSeek-V2: queries from the hidden state, any expert"
V3 = "DeepSeek-V3: short queries, groups of experts, a rope of yarn"
IN_GROUPS = {"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0}
EVERY_EXPERT = {"num_experts_per_tok": 12, "topk_group": 4}


@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        pytest.param(V2, IN_GROUPS, id="V2 in groups"),
        pytest.param(V2, {"q_lora_rank": 20}, id="V2 with short queries"),
        pytest.param(V2, {"first_k_dense_replace": 0}, id="V2, every layer sparse"),
        pytest.param(V3, {"q_lora_rank": None}, id="V3 without short queries"),
        pytest.param(V3, {"norm_topk_prob": False}, id="V3, shares as they are"),
        pytest.param(V3, {"topk_group": 4}, id="V3, one group in effect"),
        pytest.param(V3, {"n_group": 6, "topk_group": 2}, id="V3, groups of two"),
        pytest.param(V3, {"first_k_dense_replace": 3}, id="V3, every layer dense"),
        pytest.param(V3, {"rope_interleave": False}, id="V3, turned in halves"),
    ],
)
def test_each_way_gives_the_oracles_logits(variant: str, changes: dict[str, Any]) -> None:
    require_the_oracles_logits(Oracle(variant, **changes))
