"""A Qwen3 as its published directories are, only tiny: seeded weights, a tokenizer of bytes, a chat template."""

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import Qwen3Config, Qwen3ForCausalLM

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = """{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' and not message.content.startswith('<tool_response>') %}
        {%- set ns.last = messages|length - 1 - loop.index0 %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if '</think>' in content and loop.index0 < ns.last %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- if message.tool_calls or message.reasoning_content is string %}{{- 'never' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def write_qwen(made: Path, *, num_kv_heads: int = 2) -> Path:
    """With the fields of its config.json where the published ones have them."""
    _write_weights(made, num_kv_heads)
    tokenizer = byte_level_tokenizer()
    tokenizer.save(str(made / "tokenizer.json"))
    end, plain_end = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    config = json.loads((made / "config.json").read_text())
    del config["rope_parameters"], config["layer_types"]
    config |= {"rope_theta": 10_000, "rope_scaling": ROPE, "bos_token_id": plain_end, "eos_token_id": end}
    config |= {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 2}
    (made / "config.json").write_text(json.dumps(config))
    (made / "generation_config.json").write_text(json.dumps({"do_sample": True, "eos_token_id": [end, plain_end]}))
    chat = {"bos_token": None, "eos_token": "<|im_end|>", "add_bos_token": False, "chat_template": TEMPLATE}
    (made / "tokenizer_config.json").write_text(json.dumps(chat))
    return made


def byte_level_tokenizer() -> Tokenizer:
    """A token for each byte, 256 in all, and the special ones behind them."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}|\s+|[^\s\p{L}\p{N}]+"), behavior="isolated")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_of])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    return tokenizer


def _write_weights(directory: Path, num_kv_heads: int) -> None:
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=320,  # more than the tokenizer has
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=num_kv_heads,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            drawn = torch.randn(weight.shape)
            weight.copy_(1 + drawn / 3 if "norm" in name else drawn * (1.5 / weight.shape[-1] ** 0.5))
    model.save_pretrained(directory)
