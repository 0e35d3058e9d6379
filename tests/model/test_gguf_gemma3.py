"""A Gemma 3 that went through GGUF against the one it came from, as transformers computes both; and what is refused."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file
from tiny_gemma_gguf import HEAD_DIM, LAYERS, PIECES, WINDOW, gemma3_tensors, hf_gemma3, write_gemma3
from transformers import AutoConfig, AutoTokenizer, Gemma3ForCausalLM

from headrace.errors import InputError
from headrace.model.checkpoint import read_shape
from headrace.model.family_fields import LocalAttention
from headrace.model.gguf import conversion as gguf_conversion
from headrace.model.gguf.conversion import convert
from headrace.model.gguf.gemma3 import LAYER_TENSORS
from headrace.model.progress import no_progress

TOKEN_IDS = torch.tensor([[2, *range(260, 290)]])


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def converted(tmp_path: Path, model: Gemma3ForCausalLM, **options: Any) -> Path:
    directory = tmp_path / "converted"
    directory.mkdir()
    write_gemma3(tmp_path / "tiny.gguf", gemma3_tensors(model), **options)
    convert(tmp_path / "tiny.gguf", directory, "converting", no_progress)
    return directory


def test_a_model_that_went_through_gguf_is_the_same_model(tmp_path: Path) -> None:
    original = hf_gemma3()
    directory = converted(tmp_path, original)
    stored, expected = load_file(directory / "model.safetensors"), original.state_dict()
    assert stored.keys() == expected.keys() - {"lm_head.weight"}
    for name, tensor in stored.items():
        # A norm of 1e-5 has few bits left once one was added to it; what it multiplies by is the same all the same.
        tolerance = 2**-24 if "norm" in name else 0.0
        assert tensor.dtype == torch.bfloat16
        torch.testing.assert_close(tensor.float(), expected[name], rtol=0.0, atol=tolerance)
    loaded = Gemma3ForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        torch.testing.assert_close(loaded(TOKEN_IDS).logits, original(TOKEN_IDS).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block_values", [1, 100, 1 << 22])
def test_quantised_blocks_become_the_values_they_stand_for_however_they_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_values: int
) -> None:
    monkeypatch.setattr(gguf_conversion, "BLOCK_VALUES", block_values)
    original, q8 = hf_gemma3(seed=1), GGMLQuantizationType.Q8_0
    stored = load_file(converted(tmp_path, original, quantised=q8) / "model.safetensors")
    for name, values in original.state_dict().items():
        if values.ndim == 2 and name != "lm_head.weight":
            expected = gguf.quants.dequantize(gguf.quants.quantize(values.numpy(), q8), q8)
            assert torch.equal(stored[name], torch.from_numpy(expected).to(torch.bfloat16)), name


def test_the_configuration_says_what_the_file_says_and_what_it_leaves_out(tmp_path: Path) -> None:
    directory = converted(tmp_path, hf_gemma3())
    theirs, ours = AutoConfig.from_pretrained(directory), read_shape(directory)
    original = hf_gemma3().config
    for field in ("layer_types", "sliding_window", "head_dim", "rms_norm_eps", "query_pre_attn_scalar", "vocab_size"):
        assert getattr(theirs, field) == getattr(original, field), field
    assert theirs.rope_parameters == original.rope_parameters
    assert ours.local_attention == LocalAttention(layers=(0, 1, 2, 3, 4, 6), window=WINDOW, rope_theta=1e4)
    assert (ours.num_layers, ours.head_dim, ours.rope_theta, ours.max_model_len) == (LAYERS, HEAD_DIM, 1e6, 512)
    assert ours.attention_scale == HEAD_DIM**-0.5
    assert (ours.bos_token_id, ours.eos_token_ids, ours.vocab_size) == (2, (1,), len(PIECES))
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == 1


def test_the_tokenizer_stands_beside_it_and_begins_every_text(tmp_path: Path) -> None:
    directory = converted(tmp_path, hf_gemma3())
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer("the")["input_ids"][0] == tokenizer.bos_token_id == 2
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token) == ("<eos>", "<pad>", "<unk>")
    assert not (directory / "chat_template.jinja").exists()


def test_a_chat_template_is_kept(tmp_path: Path) -> None:
    directory = converted(tmp_path, hf_gemma3(), template="{{ bos_token }}é")
    assert (directory / "chat_template.jinja").read_bytes() == "{{ bos_token }}é".encode()


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        pytest.param(
            {"gemma3.rope.scaling.factor": 8}, "gemma3.rope.scaling.factor", id="the scaling of larger models"
        ),
        pytest.param({"gemma3.final_logit_softcapping": 30}, "gemma3.final_logit_softcapping", id="softcapping"),
        pytest.param({"value_length": 64}, "gemma3.attention.value_length", id="values of another length"),
        pytest.param({"add_bos_token": False}, "tokenizer.ggml.add_bos_token", id="texts without a beginning"),
    ],
)
def test_a_field_that_is_not_understood_is_refused_by_name(tmp_path: Path, extra: dict[str, Any], field: str) -> None:
    write_gemma3(tmp_path / "odd.gguf", gemma3_tensors(hf_gemma3()), extra=dict(extra))
    with pytest.raises(InputError) as caught:
        convert(tmp_path / "odd.gguf", tmp_path, "converting", no_progress)
    assert caught.value.field == field


@pytest.mark.parametrize("name", LAYER_TENSORS)
def test_a_tensor_that_is_missing_is_named(tmp_path: Path, name: str) -> None:
    tensors = gemma3_tensors(hf_gemma3())
    del tensors[f"blk.3.{name}.weight"]
    write_gemma3(tmp_path / "odd.gguf", tensors)
    with pytest.raises(InputError) as caught:
        convert(tmp_path / "odd.gguf", tmp_path, "converting", no_progress)
    assert caught.value.field == f"blk.3.{name}.weight"


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "gemma2")
    writer.add_tensor("token_embd.weight", np.ones((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(InputError, match="general.architecture: must be llama or gemma3, is 'gemma2'"):
        convert(tmp_path / "other.gguf", tmp_path, "converting", no_progress)
