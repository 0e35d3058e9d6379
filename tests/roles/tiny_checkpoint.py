"""A seeded Llama of two layers on disk, and the text that it writes, computed without pages, batches or caches."""

import random
from collections.abc import Sequence
from pathlib import Path

from seeded_checkpoint import write_seeded

from headrace.engine.requests import SamplingParams
from headrace.engine.sampling import sample, top2_margin
from headrace.kvcache.layout import KVDtype, KVLayout, PoolLayout
from headrace.kvcache.memory import PoolMemory
from headrace.kvcache.pool import layer_views
from headrace.model.batch import Batch, Row
from headrace.model.checkpoint import read_shape
from headrace.model.weights import load_model

VOCABULARY, LONGEST = 256, 512
GREEDY = SamplingParams()

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": LONGEST,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "dtype": "bfloat16",
}


def write_checkpoint(directory: Path, *, seed: int = 0) -> Path:
    return write_seeded(directory, CONFIG, seed=seed)


def kv_layout(directory: Path, *, page_size: int, dtype: KVDtype) -> KVLayout:
    return read_shape(directory).kv_layout(page_size, dtype)


class Reference:
    """In fp32. Every token from one pass over all before it."""

    def __init__(self, directory: Path) -> None:
        self._model = load_model(directory, dtype="fp32")
        kv = kv_layout(directory, page_size=LONGEST, dtype="fp32")
        layout = PoolLayout(kv=kv, num_pages=1, num_aux_slots=1, aux_slot_bytes=64)
        self._views = layer_views(PoolMemory(layout.total_bytes), layout)

    def text(self, prompt: Sequence[int], num_tokens: int, sampling: SamplingParams = GREEDY) -> tuple[int, ...]:
        token_ids = list(prompt)
        for _ in range(num_tokens):
            row = Row(token_ids=token_ids, begin=0, page_table=(0,), wants_logits=True)
            batch = Batch.of([row], page_size=LONGEST, num_pages=1, vocab_size=VOCABULARY)
            logits = self._model.forward(batch, self._views).numpy()[0]
            margin = top2_margin(logits, sampling, len(token_ids))
            assert margin > 1e-4, f"no clear token at {len(token_ids)}, take another prompt: {margin}"
            token_ids.append(sample(logits, sampling, len(token_ids)))
        return tuple(token_ids[len(prompt) :])


def prompt(num_tokens: int, *, seed: int = 0) -> list[int]:
    """Two of different seeds share no prefix."""
    return random.Random(f"{num_tokens} {seed}").choices(range(VOCABULARY), k=num_tokens)
