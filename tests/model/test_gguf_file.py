"""The reading of the container against the gguf library's own reader, and of files that are none."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from tiny_gguf import gguf_tensors, hf_tensors, write_gguf

from headrace.errors import InputError
from headrace.model.gguf.file import read_gguf


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, gguf_tensors(hf_tensors()), quantised=GGMLQuantizationType.Q4_1)
    return path


def test_fields_are_what_the_gguf_library_reads(path: Path) -> None:
    theirs = {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}
    assert {name: theirs[name] for name in theirs if not name.startswith("GGUF.")} == read_gguf(path).fields


def test_fields_of_every_type_are_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "all.gguf", "llama")
    small = {"uint8": 200, "int8": -100, "uint16": 60_000, "int16": -30_000, "bool": True, "string": "é▁"}
    large = {
        "uint32": 1 << 31,
        "int32": -(1 << 31),
        "uint64": 1 << 63,
        "int64": -(1 << 63),
        "float32": 0.5,
        "float64": 0.1,
    }
    values = small | large
    for kind, value in values.items():
        getattr(writer, f"add_{kind}")(f"one.{kind}", value)
    arrays = {"strings": ["", "a", "😀"], "floats": [0.5, -1.5], "ints": [1, -2, 3], "bools": [True, False]}
    for name, array in arrays.items():
        writer.add_array(f"many.{name}", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    fields = read_gguf(tmp_path / "all.gguf").fields
    assert {name: fields[f"one.{name}"] for name in values} == values
    assert {name: fields[f"many.{name}"] for name in arrays} == arrays


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "F32", "BF16"])
def test_rows_are_what_the_gguf_library_reads(tmp_path: Path, kind: str) -> None:
    write_gguf(tmp_path / "tiny.gguf", gguf_tensors(hf_tensors()), quantised=GGMLQuantizationType[kind])
    ours = read_gguf(tmp_path / "tiny.gguf").tensors
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "tiny.gguf").tensors}
    assert list(ours) == list(theirs)
    for name, tensor in ours.items():
        assert (tensor.kind, tensor.num_values) == (theirs[name].tensor_type, theirs[name].n_elements)
        assert tensor.shape == tuple(reversed(theirs[name].shape.tolist()))
        assert np.array_equal(tensor.data, theirs[name].data.view(np.uint8))


def test_a_file_that_ends_early_is_refused_wherever_it_ends(path: Path, tmp_path: Path) -> None:
    content = path.read_bytes()
    for size in (0, *range(1, 400, 7), 3000, len(content) // 2, len(content) - 33):
        (tmp_path / "cut.gguf").write_bytes(content[:size])
        with pytest.raises(InputError, match=r"model: .*cut.gguf must be a whole GGUF file, is not: "):
            read_gguf(tmp_path / "cut.gguf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({0: b"GGML"}, "it begins with b'GGML', version 3", id="another file"),
        pytest.param({4: b"\x01"}, "it begins with b'GGUF', version 1", id="the first version"),
        pytest.param({4: b"\x00\x00\x00\x03"}, "version 50331648", id="the other order of bytes"),
    ],
)
def test_a_file_of_another_kind_is_refused(path: Path, tmp_path: Path, change: dict[int, bytes], message: str) -> None:
    content = bytearray(path.read_bytes())
    for at, changed in change.items():
        content[at : at + len(changed)] = changed
    (tmp_path / "other.gguf").write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_gguf(tmp_path / "other.gguf")
