"""Seeded tiny Gemma 3s, twice: as transformers computes them, and as ours."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from llama_oracle import TORCH_DTYPES, VOCABULARY
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from headrace.kvcache.layout import KVDtype
from headrace.model.gemma3 import Gemma3
from headrace.model.ops import Ops
from headrace.model.shape import ModelShape
from headrace.model.torch_ops import TorchOps

LOCAL, GLOBAL = "sliding_attention", "full_attention"

GEMMA3_VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "one KV head, head_dim of its own": {
        "hidden_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 7,
        "layer_types": [LOCAL, GLOBAL, LOCAL],
        "tie_word_embeddings": True,
        "rope_parameters": {
            LOCAL: {"rope_type": "default", "rope_theta": 100.0},
            GLOBAL: {"rope_type": "default", "rope_theta": 10_000.0},
        },
    },
    "group of 3, every second layer, untied": {
        "hidden_size": 54,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 10,
        "query_pre_attn_scalar": 10,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
        "tie_word_embeddings": False,
    },
    "local in every layer": {
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "sliding_window": 3,
        "layer_types": [LOCAL] * 3,
        "tie_word_embeddings": True,
    },
}


def gemma3_config(variant: str, **changes: Any) -> Gemma3TextConfig:
    fixed = {"num_hidden_layers": 3, "intermediate_size": 40, "max_position_embeddings": 1024, "rms_norm_eps": 1e-3}
    return Gemma3TextConfig(
        architectures=["Gemma3ForCausalLM"],
        vocab_size=VOCABULARY,
        attn_implementation="eager",
        **{**fixed, **GEMMA3_VARIANTS[variant], **changes},
    )


class Gemma3Oracle:
    """transformers' model, with weights large enough that every part of it shows in the logits."""

    def __init__(self, variant: str, *, seed: int = 0, **changes: Any) -> None:
        torch.manual_seed(seed)
        self.model = Gemma3ForCausalLM(gemma3_config(variant, **changes)).eval()
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                drawn = torch.randn(weight.shape)
                drawn = drawn / 3 if "norm" in name else drawn * (1.5 / weight.shape[-1] ** 0.5)
                weight.copy_(drawn.bfloat16())  # so that bf16 differs by what it computes, not by its weights
        self.shape = ModelShape.from_config(self.model.config.to_dict())

    @torch.inference_mode()
    def logits(self, token_ids: list[int], dtype: KVDtype = "fp32") -> torch.Tensor:
        """Of every position, `[T, V] fp32`, computed in `dtype`."""
        model = self.model if dtype == "fp32" else copy.deepcopy(self.model).to(TORCH_DTYPES[dtype])
        return model(torch.tensor([token_ids])).logits[0].float()

    def ours(self, dtype: KVDtype = "fp32", wrapped: Callable[[Ops], Ops] = lambda ops: ops) -> Gemma3:
        state = self.model.state_dict()
        return Gemma3(
            self.shape, lambda name: state[name].to(TORCH_DTYPES[dtype]), wrapped(TorchOps(self.shape, dtype))
        )
