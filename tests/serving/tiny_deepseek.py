"""A DeepSeek-V3 of three layers, seeded, in a directory to serve: latents of 16 and 8, eight experts in groups."""

from pathlib import Path

import torch
from tiny_qwen import byte_level_tokenizer, draw_weights
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM


def write_deepseek(made: Path) -> Path:
    torch.manual_seed(7)
    config = DeepseekV3Config(
        vocab_size=320,
        hidden_size=48,
        intermediate_size=40,
        moe_intermediate_size=16,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=12,
        n_routed_experts=8,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=3,
        n_shared_experts=1,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = DeepseekV3ForCausalLM(config)
    draw_weights(model)
    model.save_pretrained(made)
    byte_level_tokenizer().save(str(made / "tokenizer.json"))
    return made
