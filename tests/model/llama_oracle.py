"""Seeded tiny Llamas and their near kin, twice: as transformers computes them, and as ours over pages in random order,
full of NaN."""

import copy
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from headrace.kvcache.layout import KVDtype, num_pages_for
from headrace.model.batch import Batch, Row
from headrace.model.families import FAMILIES
from headrace.model.interface import AfterLayer, Model, nothing_after
from headrace.model.ops import Ops
from headrace.model.shape import ModelShape
from headrace.model.tensors import as_computed
from headrace.model.torch_ops import TorchOps

torch.set_num_threads(1)  # the tests run on two cores, beside each other

VOCABULARY = 211

_DEEPSEEK: Mapping[str, Any] = {
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "tie_word_embeddings": False,
    "first_k_dense_replace": 1,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 24,
}
_YARN_OF_DEEPSEEK: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 256,
}

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "group of 1": {
        "hidden_size": 48,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    "group of 3, head_dim of its own": {
        "hidden_size": 54,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 10,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
    },
    "group of 4": {
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
    },
    "Qwen2: biases": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 48,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    },
    "Qwen3: normed heads, untied, a rope of yarn": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "Qwen3-MoE: a dense layer among sparse ones": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "DeepSeek-V2: queries from the hidden state, any expert": {
        **_DEEPSEEK,
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        "q_lora_rank": None,
        "n_shared_experts": 2,
        "topk_method": "greedy",
        "routed_scaling_factor": 1.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    "DeepSeek-V3: short queries, groups of experts, a rope of yarn": {
        **_DEEPSEEK,
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "q_lora_rank": 24,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "rope_parameters": {**_YARN_OF_DEEPSEEK, "mscale": 1.2, "mscale_all_dim": 0.8},
    },
}

TORCH_DTYPES: dict[KVDtype, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}


def config_of(variant: str, **changes: Any) -> PreTrainedConfig:
    fixed = {"num_hidden_layers": 3, "intermediate_size": 40, "max_position_embeddings": 1024, "rms_norm_eps": 1e-3}
    llama = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    return AutoConfig.for_model(
        vocab_size=VOCABULARY, attn_implementation="eager", **{**llama, **fixed, **VARIANTS[variant], **changes}
    )


class Oracle:
    """transformers' model, with weights large enough that every part of it shows in the logits."""

    def __init__(self, variant: str, *, seed: int = 0, **changes: Any) -> None:
        torch.manual_seed(seed)
        self.model = AutoModelForCausalLM.from_config(config_of(variant, **changes)).eval()
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                drawn = torch.randn(weight.shape)
                drawn = 1 + drawn / 3 if "norm" in name else drawn * (1.5 / weight.shape[-1] ** 0.5)
                weight.copy_(drawn.bfloat16())  # so that bf16 differs by what it computes, not by its weights
            for name, buffer in self.model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.copy_(torch.randn(buffer.shape) / 8)  # stays in fp32
        self.shape = ModelShape.from_config(self.model.config.to_dict())

    @torch.inference_mode()
    def logits(self, token_ids: list[int], dtype: KVDtype = "fp32") -> torch.Tensor:
        """Of every position, `[T, V] fp32`, computed in `dtype`."""
        model = self.model if dtype == "fp32" else copy.deepcopy(self.model).to(TORCH_DTYPES[dtype])
        return model(torch.tensor([token_ids])).logits[0].float()

    def ours(self, dtype: KVDtype = "fp32", wrapped: Callable[[Ops], Ops] = lambda ops: ops) -> Model:
        state = published(self.model.state_dict())
        return FAMILIES[self.shape.architecture].model(
            self.shape, lambda name: as_computed(state[name], TORCH_DTYPES[dtype]), wrapped(TorchOps(self.shape, dtype))
        )


def published(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As checkpoints name them: transformers holds all experts of a layer in one tensor, gate above up."""
    apart: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        experts, _, part = name.rpartition(".")
        if not experts.endswith(".experts"):
            apart[name] = tensor
            continue
        for expert, whole in enumerate(tensor):
            pieces = zip(("gate_proj", "up_proj"), whole.chunk(2), strict=True) if "up" in part else [(part, whole)]
            apart |= {f"{experts}.{expert}.{piece}.weight": weight for piece, weight in pieces}
    return apart


@dataclass(kw_only=True)
class Sequence:
    token_ids: list[int]
    page_table: list[int]
    num_computed: int = 0


class PagedLlama:
    """Our model (of any family), its views, and sequences whose pages lie anywhere."""

    def __init__(self, model: Model, *, dtype: KVDtype = "fp32", page_size: int = 5, num_pages: int = 300) -> None:
        self.model, self.page_size, self.num_pages = model, page_size, num_pages
        shape = model.shape
        size = (num_pages, *shape.kv_layout(page_size, dtype).page_shape)
        self.views = [torch.full(size, torch.nan, dtype=TORCH_DTYPES[dtype]) for _ in range(shape.num_layers)]
        self._free = random.Random(num_pages).sample(range(num_pages), num_pages)

    def sequence(self, token_ids: list[int]) -> Sequence:
        """Has one page more than it needs."""
        pages = [self._free.pop() for _ in range(num_pages_for(len(token_ids), self.page_size) + 1)]
        return Sequence(token_ids=token_ids, page_table=pages)

    def batch(self, *parts: tuple[Sequence, int], wants_logits: bool = True) -> Batch:
        """The next so many tokens of each sequence."""
        rows = [
            Row(
                token_ids=sequence.token_ids[sequence.num_computed : sequence.num_computed + num_tokens],
                begin=sequence.num_computed,
                page_table=sequence.page_table,
                wants_logits=wants_logits,
            )
            for sequence, num_tokens in parts
        ]
        return Batch.of(rows, page_size=self.page_size, num_pages=self.num_pages, vocab_size=VOCABULARY)

    def step(self, *parts: tuple[Sequence, int], after_layer: AfterLayer = nothing_after) -> torch.Tensor:
        """Compute them in one forward pass -> logits of the last token of each, `[R, V]`."""
        logits = self.model.forward(self.batch(*parts), self.views, after_layer)
        for sequence, num_tokens in parts:
            sequence.num_computed += num_tokens
        return logits


def random_tokens(num_tokens: int, *, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=num_tokens)


def relative_error(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return float((logits - expected).norm() / expected.norm())


class AnyOracle(Protocol):
    def logits(self, token_ids: list[int], dtype: KVDtype = "fp32") -> torch.Tensor: ...

    def ours(self, dtype: KVDtype = "fp32") -> Model: ...


def bf16_errors(oracle: AnyOracle) -> tuple[list[float], list[float]]:
    """Ours and transformers', both in bf16, against theirs in fp32, along a text in steps of 10 tokens and 1."""
    tokens = random_tokens(200)
    expected, theirs = oracle.logits(tokens), oracle.logits(tokens, "bf16")
    paged = PagedLlama(oracle.ours("bf16"), dtype="bf16")
    sequence = paged.sequence(tokens)
    our_errors, their_errors = [], []
    for num_tokens in (10, 1) * 18:
        logits = paged.step((sequence, num_tokens))[0]
        assert logits.dtype == torch.float32
        at = sequence.num_computed - 1
        our_errors.append(relative_error(logits, expected[at]))
        their_errors.append(relative_error(theirs[at], expected[at]))
    return our_errors, their_errors


def require_the_oracles_logits(oracle: Oracle) -> None:
    """At the end of two chunks and a decode."""
    tokens = random_tokens(40)
    expected = oracle.logits(tokens)
    paged = PagedLlama(oracle.ours())
    sequence = paged.sequence(tokens)
    for num_tokens in (25, 14, 1):
        logits = paged.step((sequence, num_tokens))[0]
        assert float((logits - expected[sequence.num_computed - 1]).abs().max()) < 1e-4 * float(expected.abs().max())
