"""Checkpoints in blocks of FP8 compute what transformers does with the values of their blocks; what is not whole, or
stored in another way, is refused by name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import WHOLE, change_config, change_tensors, saved, shard
from fp8_blocks import out_of_blocks, quantise, quantization
from llama_oracle import Oracle, PagedLlama, random_tokens
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from headrace.errors import InputError
from headrace.kvcache.layout import KVDtype
from headrace.model.block_fp8 import dequantized
from headrace.model.checkpoint import fingerprint, read_shape
from headrace.model.weights import load_model

TOKENS = random_tokens(21)

WIDE: Mapping[str, Mapping[str, Any]] = {
    "group of 4": {"hidden_size": 200, "intermediate_size": 300},
    "Qwen2: biases": {"hidden_size": 192, "intermediate_size": 130},
    "Qwen3: normed heads, untied, a rope of yarn": {"hidden_size": 129, "intermediate_size": 256},
    "Qwen3-MoE: a dense layer among sparse ones": {"hidden_size": 160, "moe_intermediate_size": 136},
}


@pytest.fixture
def twin(tmp_path: Path) -> Path:
    return tmp_path / "twin"


@pytest.fixture
def directory(tmp_path: Path, twin: Path) -> Path:
    (tmp_path / "fp8").mkdir()
    saved(Oracle("group of 4", num_hidden_layers=1), tmp_path / "fp8")
    quantise(tmp_path / "fp8", twin, (48, 32))
    return tmp_path / "fp8"


def logits_of(directory: Path, dtype: KVDtype = "fp32") -> torch.Tensor:
    paged = PagedLlama(load_model(directory, dtype=dtype), dtype=dtype, num_pages=10)
    return paged.step((paged.sequence(TOKENS), len(TOKENS)))[0]


@pytest.mark.parametrize("variant", WIDE)
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16], ids=["scales in fp32", "scales in bf16"])
def test_logits_are_transformers_over_the_values_of_the_blocks(
    variant: str, scale_dtype: torch.dtype, tmp_path: Path, twin: Path
) -> None:
    saved(Oracle(variant, seed=5, num_hidden_layers=2, **WIDE[variant]), tmp_path)
    quantise(tmp_path, twin, scale_dtype=scale_dtype)
    model = AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        expected = model(torch.tensor([TOKENS])).logits[0, -1]
    error = (logits_of(tmp_path) - expected).abs().max()
    assert float(error) < 1e-4 * float(expected.abs().max())


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_in_several_files_it_computes_bit_by_bit_what_its_twin_does(
    directory: Path, twin: Path, dtype: KVDtype
) -> None:
    expected = logits_of(twin, dtype)
    assert torch.equal(logits_of(directory, dtype), expected)
    shard(directory, num_files=3)  # weights and their scales apart
    assert torch.equal(logits_of(directory, dtype), expected)


@pytest.mark.parametrize(
    ("size", "block_size"),
    [((256, 384), (128, 128)), ((130, 257), (128, 128)), ((7, 5), (128, 128)), ((9, 14), (4, 5)), ((3, 3), (1, 1))],
)
def test_every_value_is_its_byte_times_the_scale_of_its_block(
    size: tuple[int, int], block_size: tuple[int, int]
) -> None:
    torch.manual_seed(1)
    weight = torch.randint(256, size, dtype=torch.uint8).view(torch.float8_e4m3fn)
    num_blocks = [-(-of // step) for of, step in zip(size, block_size, strict=True)]
    scales = 2.0 ** torch.randint(-9, 9, num_blocks) * (1 + torch.rand(num_blocks))
    for dtype in (torch.float32, torch.bfloat16):
        expected = out_of_blocks(weight, scales, block_size).to(dtype)
        values = dequantized(weight, scales, block_size, dtype)
        assert values.dtype == dtype
        assert torch.equal(values.nan_to_num(7e5), expected.nan_to_num(7e5))  # two of 256 bytes are no number


def test_the_shape_has_the_size_of_blocks(directory: Path, twin: Path) -> None:
    assert read_shape(directory).weight_block_size == (48, 32)
    assert read_shape(twin).weight_block_size is None


def test_a_fingerprint_is_of_bytes_scales_and_the_size_of_blocks(directory: Path, twin: Path) -> None:
    found = [fingerprint(twin, dtype="fp32"), fingerprint(directory, dtype="fp32")]
    change_tensors(directory, {SCALE: load_file(directory / WHOLE)[SCALE] * 2})
    found.append(fingerprint(directory, dtype="fp32"))
    change_config(directory, quantization_config=quantization((47, 32)))
    found.append(fingerprint(directory, dtype="fp32"))
    assert len(set(found)) == 4


def test_a_list_of_what_was_not_quantised_changes_nothing(directory: Path) -> None:
    first = fingerprint(directory, dtype="fp32")
    change_config(directory, quantization_config={**quantization((48, 32)), "modules_to_not_convert": None})
    assert fingerprint(directory, dtype="fp32") == first
    load_model(directory, dtype="fp32")


# ---- what is refused -----------------------------------------------------------------------------------------------

UP, NORM = "model.layers.0.mlp.up_proj.weight", "model.norm.weight"  # [40, 64]
SCALE = f"{UP}_scale_inv"  # [1, 2]
INPUT = "model.layers.0.mlp.up_proj.input_scale"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({SCALE: None}, f"{UP} must have {SCALE} beside it", id="no scale"),
        pytest.param({SCALE: torch.ones(2, 1)}, rf"{SCALE} must be \[1, 2\], one for .* \[48, 32\], is \[2, 1\]",
                     id="scales that are turned"),
        pytest.param({SCALE: torch.ones(1)}, rf"{SCALE} must be \[1, 2\], .* is \[1\]", id="a scale of the tensor"),
        pytest.param({SCALE: torch.ones(1, 2).half()}, f"{SCALE} must be F32, BF16, is F16", id="scales in fp16"),
        pytest.param({SCALE: torch.ones(1, 2).to(torch.float8_e8m0fnu)}, f"{SCALE} must be F32, BF16, is F8_E8M0",
                     id="scales that are powers of 2"),
        pytest.param({UP: torch.ones(40, 64)}, f"{SCALE} must not be there, as {UP} is not F8_E4M3", id="no FP8"),
        pytest.param({f"{NORM}_scale_inv": torch.ones(1)}, f"{NORM}_scale_inv must not be there", id="a norm's scale"),
        pytest.param({UP: torch.ones(40, 64).to(torch.float8_e5m2), SCALE: None},
                     f"{UP} must be BF16, F16, F32, F8_E4M3, is F8_E5M2", id="another FP8"),
        pytest.param({UP: torch.ones(9, 64).to(torch.float8_e4m3fn)}, rf"{UP} must be \[40, 64\] by .*, is \[9, 64\]",
                     id="a shape that is not the family's"),
        pytest.param({NORM: torch.ones(64).to(torch.float8_e4m3fn)}, rf"{NORM} must be a matrix .*, is \[64\]",
                     id="a vector"),
        pytest.param({INPUT: torch.ones(1)}, f"{INPUT} must not be there", id="a scale of inputs"),
    ],
)  # fmt: skip
def test_tensors_that_are_not_whole_blocks_are_refused_by_name(
    directory: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    change_tensors(directory, changes)
    with pytest.raises(InputError, match=f"{WHOLE}: {message}"):
        load_model(directory, dtype="fp32")


def test_blocks_without_a_configuration_of_them_are_refused(directory: Path) -> None:
    change_config(directory, quantization_config=...)
    with pytest.raises(InputError, match=f"{WHOLE}: .*must come with a quantization_config in config.json"):
        load_model(directory, dtype="bf16")
