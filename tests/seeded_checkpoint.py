"""Seeded tiny checkpoints on disk, of any family, in the form of the published ones."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from aligned_file import save_aligned

from headrace.model.families import FAMILIES
from headrace.model.shape import ModelShape

TINY_DEEPSEEK: Mapping[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "vocab_size": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "dtype": "bfloat16",
}
"""A V3: latents, short queries, one dense layer and two of experts in groups. Its heads and experts can be cut in 4."""


def write_seeded(directory: Path, config: Mapping[str, Any], *, seed: int = 0) -> Path:
    """Weights large enough that every part shows in the logits; matrices and norms in bf16."""
    (directory / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    shape = ModelShape.from_config(config)
    tensors = {}
    for name, size in FAMILIES[shape.architecture].tensor_shapes(shape).items():
        drawn = torch.randn(size, generator=generator)
        if name.endswith("e_score_correction_bias"):
            tensors[name] = drawn / 8  # fp32, as published
            continue
        drawn = 1 + drawn / 3 if "norm" in name else drawn * (1.5 / size[-1] ** 0.5)
        tensors[name] = drawn.bfloat16()
    save_aligned(tensors, directory / "model.safetensors")
    return directory
