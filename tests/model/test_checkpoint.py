"""A directory's configuration, headers and fingerprint: read without torch, and broken in every way that a disk can."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import WHOLE, change_config, change_tensors, raw_safetensors, saved, shard, write_index
from llama_oracle import Oracle
from safetensors.torch import load_file

from headrace.errors import InputError
from headrace.model.checkpoint import fingerprint, read_shape, stored_tensors

ORACLE = Oracle("group of 4")
INDEX = "model.safetensors.index.json"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return saved(ORACLE, tmp_path)


def test_the_shape_is_the_configurations(directory: Path) -> None:
    assert read_shape(directory) == ORACLE.shape
    assert read_shape(directory).rope_theta == 100_000.0


def test_the_bytes_of_each_tensor_are_where_the_header_says(directory: Path) -> None:
    tensors = load_file(directory / WHOLE)
    stored = stored_tensors(directory)
    assert stored.keys() == tensors.keys()
    whole = (directory / WHOLE).read_bytes()
    for name, tensor in tensors.items():
        entry = stored[name]
        assert (entry.file, entry.dtype, entry.shape) == (directory / WHOLE, "F32", tuple(tensor.shape))
        assert whole[entry.begin : entry.end] == tensor.numpy().tobytes()


def test_tensors_spread_over_files_are_found_in_theirs(directory: Path) -> None:
    tensors = load_file(directory / WHOLE)
    files = shard(directory, num_files=3)
    stored = stored_tensors(directory)
    assert {name: entry.shape for name, entry in stored.items()} == {name: t.shape for name, t in tensors.items()}
    assert {entry.file for entry in stored.values()} == set(files)
    for name, entry in stored.items():
        assert entry.file.read_bytes()[entry.begin : entry.end] == tensors[name].numpy().tobytes()


# ---- the fingerprint -----------------------------------------------------------------------------------------------


def test_a_fingerprint_is_short_and_stays(directory: Path) -> None:
    first = fingerprint(directory, dtype="bf16")
    assert first == fingerprint(directory, dtype="bf16")
    assert len(first) == 32 and int(first, 16) >= 0


def test_a_fingerprint_does_not_depend_on_how_files_are_written(directory: Path) -> None:
    first = fingerprint(directory, dtype="fp32")
    change_config(directory, use_cache=False, rope_theta=100_000, rope_parameters=None, transformers_version="0")
    change_tensors(directory, {})  # the same, without metadata
    assert fingerprint(directory, dtype="fp32") == first
    shard(directory, num_files=2)
    assert fingerprint(directory, dtype="fp32") == first


def nudge(name: str) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        weight = load_file(directory / WHOLE)[name]
        weight.view(-1)[-1] += 1e-3
        change_tensors(directory, {name: weight})

    return change


def swap_two_layers(directory: Path) -> None:
    names = [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1)]
    tensors = load_file(directory / WHOLE)
    change_tensors(directory, {names[0]: tensors[names[1]], names[1]: tensors[names[0]]})


def rename_one(directory: Path) -> None:
    """To a name with the same place in the order."""
    name = "model.norm.weight"
    change_tensors(directory, {name: None, f"{name}s": load_file(directory / WHOLE)[name]})


def reshape_one(directory: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    change_tensors(directory, {name: load_file(directory / WHOLE)[name].reshape(64, 40)})


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda directory: change_config(directory, rope_parameters={"rope_theta": 1e4}), id="theta"),
        pytest.param(lambda directory: change_config(directory, rms_norm_eps=1e-5), id="epsilon"),
        pytest.param(nudge("model.layers.1.mlp.down_proj.weight"), id="one number of one layer"),
        pytest.param(nudge("model.norm.weight"), id="one number of the last norm"),
        pytest.param(swap_two_layers, id="two layers exchanged"),
        pytest.param(rename_one, id="the same bytes under another name"),
        pytest.param(reshape_one, id="the same bytes in another shape"),
        pytest.param(lambda directory: change_tensors(directory, {"one_more": torch.zeros(1)}), id="a tensor more"),
    ],
)
def test_a_fingerprint_changes_with_whatever_is_computed(directory: Path, change: Callable[[Path], None]) -> None:
    first = fingerprint(directory, dtype="fp32")
    change(directory)
    assert fingerprint(directory, dtype="fp32") != first


def test_a_fingerprint_changes_with_the_dtype(directory: Path) -> None:
    assert fingerprint(directory, dtype="fp32") != fingerprint(directory, dtype="bf16")


def test_shape_and_fingerprint_are_read_without_torch(directory: Path) -> None:
    script = (
        "import pathlib, sys; from headrace.model.checkpoint import fingerprint, read_shape;"
        "directory = pathlib.Path(sys.argv[1]); print(read_shape(directory).num_layers,"
        "fingerprint(directory, dtype='bf16'), 'torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script, str(directory)]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["3", fingerprint(directory, dtype="bf16"), "False"]


# ---- what is broken ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(None, "config.json must be a file that can be read: No such file", id="missing"),
        pytest.param(b"", "config.json must be JSON, is not", id="empty"),
        pytest.param(b'{"hidden_size": 5', "config.json must be JSON, is not", id="cut off"),
        pytest.param(b"\xff\xfe\x00", "config.json must be JSON, is not", id="no text"),
        pytest.param(b"[1]", "config.json must be a JSON object, is list", id="a list"),
        pytest.param(b"{}", "architectures: must be", id="nothing in it"),
    ],
)
def test_a_broken_configuration_is_named(directory: Path, content: bytes | None, message: str) -> None:
    (directory / "config.json").unlink()
    if content is not None:
        (directory / "config.json").write_bytes(content)
    for read in (read_shape, lambda there: fingerprint(there, dtype="bf16")):
        with pytest.raises(InputError, match=message):
            read(directory)


def cut(num_bytes: int) -> Callable[[bytes], bytes]:
    return lambda whole: whole[:num_bytes]


HEADER = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(cut(0), id="empty"),
        pytest.param(cut(7), id="cut within the length"),
        pytest.param(cut(100), id="cut within the header"),
        pytest.param(lambda whole: whole[:-1], id="the last byte is missing"),
        pytest.param(lambda whole: whole + b"x", id="a byte too many"),
        pytest.param(lambda whole: b"\xff" * 16 + whole[16:], id="an endless header"),
        pytest.param(lambda whole: whole[:9] + b"\x00" + whole[10:], id="a broken header"),
        pytest.param(lambda whole: b"version https://git-lfs", id="a pointer to large files"),
        pytest.param(lambda whole: raw_safetensors([], b""), id="a list as its header"),
        pytest.param(lambda whole: raw_safetensors(HEADER, b"1234"), id="data that ends early"),
        pytest.param(lambda whole: raw_safetensors({**HEADER, "b": HEADER["a"]}, b"12345678"), id="tensors overlap"),
        pytest.param(lambda whole: raw_safetensors({"a": {"dtype": "F32"}}, b""), id="a tensor without a place"),
    ],
)
def test_a_broken_file_is_named(directory: Path, broken: Callable[[bytes], bytes]) -> None:
    file = directory / WHOLE
    file.write_bytes(broken(file.read_bytes()))
    with pytest.raises(InputError, match=f"^model: {file} must be a whole safetensors file, is not"):
        stored_tensors(directory)
    with pytest.raises(InputError, match=f"^model: {file} must be a whole safetensors file, is not"):
        fingerprint(directory, dtype="bf16")


def test_a_directory_without_weights_says_what_it_should_have(directory: Path) -> None:
    (directory / WHOLE).rename(directory / "pytorch_model.bin")
    with pytest.raises(InputError, match=f"must have {WHOLE} or {INDEX}, has neither"):
        stored_tensors(directory)


def test_a_file_that_the_index_names_and_nobody_downloaded_is_named(directory: Path) -> None:
    files = shard(directory, num_files=2)
    files[1].unlink()
    with pytest.raises(InputError, match=f"{files[1]} must be a file that can be read: No such file"):
        stored_tensors(directory)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        pytest.param({}, "have a weight_map", id="no map"),
        pytest.param({"weight_map": [1]}, "have a weight_map", id="a list"),
        pytest.param({"weight_map": {"a": 1}}, "have a weight_map", id="a number for a file"),
        pytest.param({"weight_map": {"a": "../model.safetensors"}}, "files beside it", id="out of the directory"),
        pytest.param({"weight_map": {"a": "/etc/passwd"}}, "files beside it", id="anywhere"),
        pytest.param({"weight_map": {"a": ""}}, "files beside it", id="no name"),
        pytest.param({"weight_map": {"a": ".."}}, "files beside it", id="the directory above"),
        pytest.param({"weight_map": {"a": "model.bin"}}, "files beside it", id="another format"),
        pytest.param([], "be a JSON object, is list", id="no object"),
    ],
)
def test_a_broken_index_is_named(directory: Path, index: object, message: str) -> None:
    shard(directory, num_files=2)
    write_index(directory, index)
    with pytest.raises(InputError, match=f"{INDEX} .*{message}"):
        stored_tensors(directory)


@pytest.mark.parametrize("move", ["model.norm.weight", "one_more"])
def test_a_file_with_other_tensors_than_the_index_says_is_named(directory: Path, move: str) -> None:
    files = shard(directory, num_files=2)
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"][move] = files[0].name if index["weight_map"].get(move) != files[0].name else files[1].name
    write_index(directory, index)
    with pytest.raises(InputError, match=f"must have the tensors that {INDEX} says; {move} differs"):
        stored_tensors(directory)


def test_a_tensor_that_the_index_forgot_is_named(directory: Path) -> None:
    files = shard(directory, num_files=2)
    index = json.loads((directory / INDEX).read_text())
    file = index["weight_map"].pop("model.norm.weight")
    write_index(directory, index)
    with pytest.raises(InputError, match=f"{file} must have the tensors .* model.norm.weight differs"):
        stored_tensors(directory)
    assert file in {each.name for each in files}
