"""The conversion against what transformers computes, and against quantised blocks taken apart by hand."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_gguf import HEAD_DIM, HEADS, KV_HEADS, Floats, gguf_tensors, hf_tensors, neighbours, write_gguf
from transformers import AutoConfig, LlamaForCausalLM

from headrace.errors import InputError
from headrace.model.checkpoint import read_shape
from headrace.model.gguf.conversion import convert, to_bf16
from headrace.model.progress import no_progress

TOKEN_IDS = torch.tensor([[1, 40, 41, 90, 7, 200, 2]])


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def converted(tmp_path: Path, tensors: dict[str, Floats], **options: Any) -> Path:
    """`tensors` of Hugging Face, through a GGUF file, back in a Hugging Face directory."""
    directory = tmp_path / "converted"
    directory.mkdir()
    write_gguf(tmp_path / "tiny.gguf", gguf_tensors(tensors), **options)
    convert(tmp_path / "tiny.gguf", directory, "converting", no_progress)
    return directory


def logits_of(model: LlamaForCausalLM) -> torch.Tensor:
    with torch.inference_mode():
        return model(TOKEN_IDS).logits


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_model_that_went_through_gguf_is_the_same_model(tmp_path: Path, tied: bool) -> None:
    tensors = hf_tensors(tied=tied)
    directory = converted(tmp_path, tensors)
    stored = load_file(directory / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in stored.items()} == dict.fromkeys(tensors, torch.bfloat16)
    for name, values in tensors.items():
        assert torch.equal(stored[name].float(), torch.from_numpy(values)), name

    original = LlamaForCausalLM(AutoConfig.from_pretrained(directory)).eval()
    missing, unexpected = original.load_state_dict(
        {name: torch.from_numpy(values) for name, values in tensors.items()}, strict=False
    )
    assert missing == (["lm_head.weight"] if tied else []) and unexpected == []
    loaded = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert torch.equal(logits_of(loaded), logits_of(original))


def test_rows_are_put_back_so_that_rotating_halves_does_what_rotating_neighbours_did(tmp_path: Path) -> None:
    """The one fact the order of rows rests on, computed both ways for a query at position 5."""
    tensors = hf_tensors(seed=3)
    directory = converted(tmp_path, tensors)
    with safe_open(directory / "model.safetensors", "pt") as file:
        ours = file.get_tensor("model.layers.0.self_attn.q_proj.weight").float().numpy()
    theirs = gguf_tensors(tensors)["blk.0.attn_q.weight"]
    hidden = np.random.default_rng(1).standard_normal(theirs.shape[1]).astype(np.float32)
    angle = 5 * 100_000.0 ** (-np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    turn = np.cos(angle) + 1j * np.sin(angle)
    for head in range(HEADS):
        rows = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
        of_halves, of_neighbours = ours[rows] @ hidden, theirs[rows] @ hidden
        by_halves = (of_halves[: HEAD_DIM // 2] + 1j * of_halves[HEAD_DIM // 2 :]) * turn
        by_neighbours = (of_neighbours[0::2] + 1j * of_neighbours[1::2]) * turn
        np.testing.assert_allclose(by_halves, by_neighbours, rtol=1e-5)


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_quantised_blocks_become_the_values_they_stand_for(tmp_path: Path, kind: str) -> None:
    tensors, quantised = hf_tensors(seed=1), GGMLQuantizationType[kind]
    stored = load_file(converted(tmp_path, tensors, quantised=quantised) / "model.safetensors")
    heads = {"q_proj": HEADS, "k_proj": KV_HEADS}
    for name, values in tensors.items():
        expected = values
        if values.ndim == 2:
            num_heads = heads.get(name.split(".")[-2])
            rows = values if num_heads is None else neighbours(values, num_heads)
            rows = gguf.quants.dequantize(gguf.quants.quantize(rows, quantised), quantised)
            expected = rows if num_heads is None else by_hand(rows, num_heads)
            assert np.abs(expected - values).max() < 0.1  # the reference itself is near the original
        assert torch.equal(stored[name], torch.from_numpy(expected).to(torch.bfloat16)), name


def by_hand(rows: Floats, num_heads: int) -> Floats:
    """Row by row: neighbour 2i of a head is its row i, neighbour 2i + 1 its row i + d/2."""
    result, head_dim = np.empty_like(rows), rows.shape[0] // num_heads
    for head in range(num_heads):
        for i in range(head_dim // 2):
            result[head * head_dim + i] = rows[head * head_dim + 2 * i]
            result[head * head_dim + head_dim // 2 + i] = rows[head * head_dim + 2 * i + 1]
    return result


def test_bf16_is_rounded_as_torch_rounds_it() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 200_000, dtype=np.uint32)
    bits[:4] = [0x3F808000, 0x3F818000, 0x3F807FFF, 0x80000000]  # both ties, just below one, minus zero
    values = bits.view(np.float32)
    values = values[np.isfinite(values)]
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy()
    assert np.array_equal(to_bf16(values).view(np.int16), expected)


def test_the_configuration_says_what_the_file_says(tmp_path: Path) -> None:
    directory = converted(tmp_path, hf_tensors())
    config = json.loads((directory / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 100_000.0
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == 2

    theirs, ours = AutoConfig.from_pretrained(directory), read_shape(directory)
    assert theirs.rope_parameters["rope_theta"] == 100_000.0 and theirs.rope_parameters["rope_type"] == "default"
    assert (theirs.head_dim, theirs.num_key_value_heads, theirs.dtype) == (HEAD_DIM, KV_HEADS, torch.bfloat16)
    assert (ours.rope_theta, ours.head_dim, ours.num_kv_heads) == (100_000.0, HEAD_DIM, KV_HEADS)
    assert (ours.bos_token_id, ours.eos_token_ids, ours.max_model_len) == (1, (2,), 512)


def test_progress_counts_the_bytes_of_the_result(tmp_path: Path) -> None:
    tensors, calls = hf_tensors(), []
    write_gguf(tmp_path / "tiny.gguf", gguf_tensors(tensors))
    convert(tmp_path / "tiny.gguf", tmp_path, "converting it", lambda *call: calls.append(call))
    total_bytes = sum(2 * values.size for values in tensors.values())
    assert {(stage, total) for stage, _, total in calls} == {("converting it", total_bytes)}
    done = [done_bytes for _, done_bytes, _ in calls]
    assert done == sorted(done) and (done[0], done[-1]) == (0, total_bytes) and len(done) == len(tensors) + 1


def test_a_file_with_what_we_do_not_understand_is_refused_by_name(tmp_path: Path) -> None:
    def refused(tensors: dict[str, Floats], **options: Any) -> str:
        write_gguf(tmp_path / "odd.gguf", tensors, **options)
        with pytest.raises(InputError) as caught:
            convert(tmp_path / "odd.gguf", tmp_path, "converting", no_progress)
        return caught.value.field

    tensors = gguf_tensors(hf_tensors())
    assert refused(tensors, extra={"llama.expert_count": 8}) == "llama.expert_count"
    assert refused(tensors, pre="llama-bpe") == "tokenizer.ggml.pre"
    assert refused(tensors | {"rope_freqs.weight": np.ones(8, np.float32)}) == "rope_freqs.weight"
    del tensors["blk.1.ffn_up.weight"]
    assert refused(tensors) == "blk.1.ffn_up.weight"
