"""Checkpoints written by transformers, loaded and computed with; and every one that is not the family's refused."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import WHOLE, change_config, change_tensors, saved, shard
from llama_oracle import TORCH_DTYPES, VARIANTS, Oracle, PagedLlama, random_tokens
from safetensors.torch import load_file

from headrace.errors import InputError
from headrace.kvcache.layout import KVDtype
from headrace.model.llama import Llama
from headrace.model.weights import load_model

ORACLE = Oracle("group of 4")  # tied
UNTIED = Oracle("group of 3, head_dim of its own")
TOKENS = random_tokens(21)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return saved(ORACLE, tmp_path)


def logits_of(directory: Path, dtype: KVDtype = "fp32") -> torch.Tensor:
    model = load_model(directory, dtype=dtype)
    assert isinstance(model, Llama)
    paged = PagedLlama(model, dtype=dtype)
    return paged.step((paged.sequence(TOKENS), len(TOKENS)))[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_saved_checkpoint_computes_what_the_oracle_does(variant: str, tmp_path: Path) -> None:
    oracle = Oracle(variant, seed=5)
    saved(oracle, tmp_path)
    assert load_model(tmp_path, dtype="fp32").shape == oracle.shape
    torch.testing.assert_close(logits_of(tmp_path), oracle.logits(TOKENS)[-1], rtol=1e-4, atol=1e-4)


def test_an_old_configuration_with_its_theta_at_the_top_computes_the_same(directory: Path) -> None:
    expected = logits_of(directory)
    change_config(directory, rope_parameters=..., rope_theta=100_000.0, rope_scaling=None)
    assert torch.equal(logits_of(directory), expected)
    change_config(directory, rope_theta=...)  # 10,000: it would show
    assert float((logits_of(directory) - expected).abs().max()) > 1e-2


def test_a_checkpoint_in_several_files_computes_the_same(directory: Path) -> None:
    expected = logits_of(directory)
    shard(directory, num_files=3)
    assert torch.equal(logits_of(directory), expected)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_weights_are_cast_from_what_is_stored(directory: Path, stored: torch.dtype, dtype: KVDtype) -> None:
    tensors = load_file(directory / WHOLE)
    change_tensors(directory, {name: tensor.to(stored) for name, tensor in tensors.items()})
    logits = logits_of(directory, dtype)
    rounded = Oracle("group of 4")
    with torch.no_grad():
        for weight in rounded.model.parameters():
            weight.copy_(weight.to(stored).to(TORCH_DTYPES[dtype]))
    paged = PagedLlama(rounded.ours(dtype), dtype=dtype)
    torch.testing.assert_close(logits, paged.step((paged.sequence(TOKENS), len(TOKENS)))[0], rtol=1e-6, atol=1e-6)


def test_a_tied_head_that_is_stored_all_the_same_is_taken_if_it_is_equal(directory: Path) -> None:
    expected = logits_of(directory)
    embedding = load_file(directory / WHOLE)["model.embed_tokens.weight"]
    change_tensors(directory, {"lm_head.weight": embedding.clone()})
    assert torch.equal(logits_of(directory), expected)
    embedding[7, 7] += 1
    change_tensors(directory, {"lm_head.weight": embedding})
    with pytest.raises(InputError, match=f"{WHOLE}: lm_head.weight must equal .*it differs"):
        load_model(directory, dtype="fp32")


def test_rotary_frequencies_of_old_checkpoints_are_left_out(directory: Path) -> None:
    expected = logits_of(directory)
    change_tensors(directory, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    assert torch.equal(logits_of(directory), expected)


UP, NORM = "model.layers.2.mlp.up_proj.weight", "model.norm.weight"
FOURTH = "model.layers.3.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({UP: None}, f"must have 29 tensors, 1 miss: {UP}$", id="one missing"),
        pytest.param(
            {f"model.layers.{layer}.mlp.{part}_proj.weight": None for layer in (0, 1) for part in ("up", "down")},
            "must have 29 tensors, 4 miss: model.layers.0.mlp.up_proj.weight, .*, .*, ..$",
            id="four missing",
        ),
        pytest.param({UP: torch.ones(9, 64)}, rf"{WHOLE}: {UP} must be \[40, 64\] by .*, is \[9, 64\]", id="shape"),
        pytest.param({NORM: torch.ones(64, 1)}, rf"{WHOLE}: {NORM} must be \[64\].*, is \[64, 1\]", id="dimensions"),
        pytest.param({UP: torch.ones(64, 40)}, rf"{WHOLE}: {UP} must be \[40, 64\]", id="transposed"),
        pytest.param({UP: torch.ones(40, 64, dtype=torch.int8)}, f"{UP} must be BF16, F16, F32, F8_E4M3, is I8",
                     id="integers"),
        pytest.param({FOURTH: torch.ones(40, 64)}, f"{FOURTH} must not be there", id="a layer more"),
        pytest.param({"model.layers.0.self_attn.q_proj.bias": torch.ones(128)}, "bias must not be there", id="a bias"),
    ],
)  # fmt: skip
def test_a_checkpoint_that_is_not_the_familys_is_refused_by_tensor_and_file(
    directory: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    change_tensors(directory, changes)
    with pytest.raises(InputError, match=message):
        load_model(directory, dtype="fp32")


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        ("Qwen2: biases", "model.layers.1.self_attn.k_proj.bias"),
        ("Qwen3: normed heads, untied, a rope of yarn", "model.layers.1.self_attn.k_norm.weight"),
    ],
)
def test_a_qwen_without_what_makes_it_one_is_refused(variant: str, name: str, tmp_path: Path) -> None:
    saved(Oracle(variant), tmp_path)
    change_tensors(tmp_path, {name: None})
    with pytest.raises(InputError, match=f"1 miss: {name}$"):
        load_model(tmp_path, dtype="fp32")


def test_an_untied_checkpoint_needs_its_head(tmp_path: Path) -> None:
    saved(UNTIED, tmp_path)
    change_tensors(tmp_path, {"lm_head.weight": None})
    with pytest.raises(InputError, match="must have 30 tensors, 1 miss: lm_head.weight"):
        load_model(tmp_path, dtype="fp32")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        pytest.param(lambda there: (there / "config.json").unlink(), "config.json must be a file", id="no config"),
        pytest.param(lambda there: (there / WHOLE).unlink(), "must have model.safetensors or", id="no weights"),
        pytest.param(lambda there: (there / WHOLE).write_bytes(b"12345678"), "a whole safetensors file", id="no file"),
        pytest.param(lambda there: change_config(there, attention_bias=True), "^attention_bias: ", id="another model"),
        pytest.param(
            lambda there: change_config(there, intermediate_size=41), r"must be \[64, 41\] by", id="other sizes"
        ),
        pytest.param(lambda there: change_config(there, num_hidden_layers=2), "must not be there", id="fewer layers"),
    ],
)
def test_a_broken_directory_is_one_input_error(directory: Path, spoil: Callable[[Path], object], message: str) -> None:
    spoil(directory)
    with pytest.raises(InputError, match=message):
        load_model(directory, dtype="bf16")


def test_weights_that_need_no_cast_stay_mapped_from_their_file(directory: Path) -> None:
    model = load_model(directory, dtype="fp32")
    assert isinstance(model, Llama)
    place = model._embedding.data_ptr()
    with Path("/proc/self/maps").open() as maps:
        for line in maps:
            begin, end = (int(address, 16) for address in line.split()[0].split("-"))
            if begin <= place < end:
                assert line.rstrip().endswith(WHOLE)
                return
    pytest.fail("the embedding is nowhere")
