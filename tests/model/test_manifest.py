"""A sealed directory against everything that may happen to it afterwards."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.model import manifest
from headrace.model.manifest import MANIFEST, is_whole, seal


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(bytes(range(256)) * 16)
    seal(directory, "wheel 1")
    return directory


def flip(path: Path) -> None:
    """Another byte in the middle, the size as before."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b" ")


def test_a_sealed_directory_is_whole(sealed: Path) -> None:
    assert is_whole(sealed, "wheel 1")


def test_of_another_origin_it_is_not(sealed: Path) -> None:
    assert not is_whole(sealed, "wheel 2")


@pytest.mark.parametrize("damage", [flip, cut, grow, Path.unlink])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_changed_file_is_seen(sealed: Path, name: str, damage: Callable[[Path], None]) -> None:
    damage(sealed / name)
    assert not is_whole(sealed, "wheel 1")


@pytest.mark.parametrize("damage", [cut, Path.unlink, lambda path: path.write_text("{}")], ids=["cut", "gone", "empty"])
def test_without_its_manifest_nothing_is_whole(sealed: Path, damage: Callable[[Path], object]) -> None:
    (sealed / MANIFEST).write_bytes((sealed / MANIFEST).read_bytes().rstrip())
    damage(sealed / MANIFEST)
    assert not is_whole(sealed, "wheel 1")


def test_nothing_and_a_file_are_no_whole_directories(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "odd" / MANIFEST).mkdir(parents=True)
    assert not any(is_whole(tmp_path / name, "wheel 1") for name in ("absent", "file", "odd"))


def test_a_large_file_is_hashed_only_when_its_time_of_change_is_another(
    sealed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []

    def counted(path: Path) -> str:
        hashed.append(path.name)
        return sha256_of(path)

    sha256_of = manifest.sha256_of
    monkeypatch.setattr(manifest, "sha256_of", counted)
    monkeypatch.setattr(manifest, "SMALL_BYTES", 1000)
    assert is_whole(sealed, "wheel 1") and hashed == ["config.json"]
    os.utime(sealed / "model.safetensors", ns=(0, 0))
    assert is_whole(sealed, "wheel 1") and hashed == ["config.json", "config.json", "model.safetensors"]
    flip(sealed / "model.safetensors")
    assert not is_whole(sealed, "wheel 1")


def test_a_large_file_that_was_cut_is_seen_by_its_size(sealed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "SMALL_BYTES", 1000)
    mtime_ns = (sealed / "model.safetensors").stat().st_mtime_ns
    cut(sealed / "model.safetensors")
    os.utime(sealed / "model.safetensors", ns=(mtime_ns, mtime_ns))
    assert not is_whole(sealed, "wheel 1")


def test_a_copy_is_as_whole_as_the_original(sealed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "SMALL_BYTES", 1000)
    shutil.copytree(sealed, sealed.parent / "copy", copy_function=shutil.copyfile)
    assert is_whole(sealed.parent / "copy", "wheel 1")
