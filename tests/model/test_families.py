"""The table of families against what `shape` knows, and against the models that transformers makes."""

import torch
from llama_oracle import published
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.model.families import FAMILIES
from headrace.model.shape import ARCHITECTURES, ModelShape

SMALL = {
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 101,
}
DEEPSEEK = {
    "head_dim": 64,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
}
OF_ITS_OWN = {
    "DeepseekV2ForCausalLM": DEEPSEEK,
    "DeepseekV3ForCausalLM": {**DEEPSEEK, "n_group": 4, "topk_group": 2},
}
MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Gemma3ForCausalLM": "gemma3_text",
}


def test_every_architecture_that_has_a_shape_has_a_model() -> None:
    assert set(FAMILIES) == set(ARCHITECTURES) == set(MODEL_TYPES)


def test_the_tensors_of_each_family_are_those_of_transformers_model() -> None:
    for architecture, model_type in MODEL_TYPES.items():
        for tied in (True, False):
            fields = {**SMALL, "tie_word_embeddings": tied, **OF_ITS_OWN.get(architecture, {})}
            config = AutoConfig.for_model(model_type, architectures=[architecture], pad_token_id=0, **fields)
            with torch.device("meta"):
                state = AutoModelForCausalLM.from_config(config).state_dict()
            shapes = FAMILIES[architecture].tensor_shapes(ModelShape.from_config(config.to_dict()))
            theirs = {name: tuple(tensor.shape) for name, tensor in published(state).items()}
            if tied:
                del theirs["lm_head.weight"]
            assert shapes == theirs
