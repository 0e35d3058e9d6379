"""The arithmetic against what is known of public models: KV bytes of a token, bytes of their checkpoints."""

import pytest

from headrace.deploy.known import FILE_OF, MODELS, known_config
from headrace.deploy.weights import Held
from headrace.errors import InputError
from headrace.model import deepseek
from headrace.model.families import FAMILIES
from headrace.model.shape import ModelShape


def shape_of(name: str) -> ModelShape:
    return ModelShape.from_config(known_config(name))


@pytest.mark.parametrize(
    ("name", "token_bytes"),
    [
        ("deepseek-ai/DeepSeek-V3", 70_272),
        ("Qwen/Qwen3-Coder-480B-A35B-Instruct", 253_952),
        ("Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8", 253_952),
        ("meta-llama/Llama-3.1-8B", 131_072),
        ("meta-llama/Llama-3.1-70B", 327_680),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 23_040),
    ],
)
def test_the_kv_of_a_token_takes_as_many_bytes_as_is_known(name: str, token_bytes: int) -> None:
    assert shape_of(name).kv_layout(64, "bf16").token_bytes == token_bytes


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("Qwen/Qwen3-Coder-480B-A35B-Instruct", 960_309_750_784),
        ("meta-llama/Llama-3.1-8B", 16_060_522_496),
        ("meta-llama/Llama-3.1-70B", 141_107_412_992),
        ("smollm2-135m-instruct", 269_030_016),
    ],
)
def test_the_weights_take_as_many_bytes_as_the_published_index_says(name: str, published: int) -> None:
    shape = shape_of(name)
    assert Held.on_disk(shape).num_bytes(FAMILIES[shape.architecture].tensor_shapes(shape)) == published


def test_deepseek_r1_takes_what_its_published_files_hold_but_for_their_headers() -> None:
    shape = shape_of("deepseek-ai/DeepSeek-R1")
    held, shapes = Held.on_disk(shape), {**deepseek.tensor_shapes(shape), **deepseek.mtp_tensor_shapes(shape)}
    in_headers = 688_586_727_753 - held.num_bytes(shapes)
    num_stored = 2 * len(shapes)  # most weights have their scales beside them
    assert 100 < in_headers / num_stored < 200, "a tensor's name, dtype, shape and place, as JSON"


def test_every_name_has_its_file_and_every_file_a_name() -> None:
    assert {f"{file}.json" for file in FILE_OF.values()} == {file.name for file in MODELS.glob("*.json")}


def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(
        InputError, match="^model: must be a directory or, without --config, one of deepseek-ai/.*; is 'org/x'$"
    ):
        known_config("org/x")
