"""Models of a hub on the loopback, through the real client: what is fetched, what is kept, what is said."""

import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from loopback_server import COMMIT, CONFIG, FILES, REPO, LoopbackServer, put_model, serving

from headrace.errors import InputError
from headrace.model import hub
from headrace.model.hub import cached_snapshot, download_snapshot
from headrace.model.progress import Progress, no_progress

OTHERS = {"README.md": b"# tiny", "pytorch_model.bin": b"pickle", "original/model-1.safetensors": b"again"}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackServer]:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with serving() as server:
        yield server


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "hub"


def download(server: LoopbackServer, cache: Path, progress: Progress = no_progress) -> Path:
    return download_snapshot(REPO, progress, cache=cache, endpoint=server.url)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_what_a_model_needs_is_fetched_and_nothing_else(server: LoopbackServer, cache: Path) -> None:
    put_model(server, REPO, FILES | OTHERS)
    assert cached_snapshot(REPO, cache=cache) is None
    directory = download(server, cache)
    assert contents(directory) == FILES
    num_asked = len(server.asked)
    assert cached_snapshot(REPO, cache=cache) == directory
    assert len(server.asked) == num_asked


def test_weights_in_parts_are_fetched_whole(server: LoopbackServer, cache: Path) -> None:
    parts = {f"model-0000{n}-of-00002.safetensors": bytes([n]) * 1000 for n in (1, 2)}
    index = {"model.safetensors.index.json": b"{}"}
    files = {name: body for name, body in FILES.items() if name != "model.safetensors"} | parts | index
    put_model(server, REPO, files)
    assert contents(download(server, cache)) == files


def test_progress_counts_bytes_and_ends_at_all_of_them(server: LoopbackServer, cache: Path) -> None:
    put_model(server, REPO, FILES)
    calls: list[tuple[str, int, int]] = []
    download(server, cache, lambda *call: calls.append(call))
    total_bytes = sum(len(body) for body in FILES.values())
    assert {(stage, total) for stage, _, total in calls} == {(f"fetching {REPO}", total_bytes)}
    done = [done_bytes for _, done_bytes, _ in calls]
    assert done == sorted(done) and (done[0], done[-1]) == (0, total_bytes)
    assert len(FILES["model.safetensors"]) in range(done[-2] + 1), "the bytes are reported as they come"


def test_a_download_that_broke_off_is_not_taken_for_a_snapshot(server: LoopbackServer, cache: Path) -> None:
    put_model(server, REPO, FILES)
    path = f"/{REPO}/resolve/{COMMIT}/tokenizer.json"
    del server.pages[path]
    with pytest.raises(InputError, match="could not be fetched from the hub: "):
        download(server, cache)
    assert cached_snapshot(REPO, cache=cache) is None
    put_model(server, REPO, FILES)
    assert contents(download(server, cache)) == FILES


@pytest.mark.parametrize(
    ("left_out", "said"),
    [
        ("config.json", "config.json"),
        ("tokenizer.json", "tokenizer.json"),
        ("model.safetensors", "model.safetensors or model.safetensors.index.json"),
    ],
)
def test_a_repository_without_a_model_we_can_load_is_refused_before_the_download(
    server: LoopbackServer, cache: Path, left_out: str, said: str
) -> None:
    put_model(server, REPO, {name: body for name, body in FILES.items() if name != left_out} | OTHERS)
    with pytest.raises(InputError, match=f"must have {said}, which '{REPO}' on the hub lacks"):
        download(server, cache)
    assert [path for _, path in server.asked if "resolve" in path] == []


def test_a_configuration_we_do_not_know_is_refused_before_the_weights(server: LoopbackServer, cache: Path) -> None:
    put_model(server, REPO, FILES | {"config.json": json.dumps(CONFIG | {"architectures": ["Mamba"]}).encode()})
    with pytest.raises(InputError, match="Mamba"):
        download(server, cache)
    assert [path for _, path in server.asked if path.endswith(".safetensors")] == []


def refusal(server: LoopbackServer, cache: Path, status: int, headers: dict[str, str]) -> str:
    for path in (f"/api/models/{REPO}", f"/api/models/{REPO}/revision/main"):
        server.refused[path] = (status, headers)
    with pytest.raises(InputError) as caught:
        download(server, cache)
    assert caught.value.field == "model" and "\n" not in str(caught.value)
    return str(caught.value)


def test_what_the_hub_refuses_is_one_clear_line(server: LoopbackServer, cache: Path) -> None:
    assert f"must be on the hub, '{REPO}' is not" in refusal(server, cache, 401, {"X-Error-Code": "RepoNotFound"})
    assert f"must be on the hub, '{REPO}' is not" in refusal(server, cache, 404, {"X-Error-Code": "RepoNotFound"})
    assert "conditions to be accepted" in refusal(server, cache, 403, {"X-Error-Code": "GatedRepo"})
    assert "could not be fetched from the hub: " in refusal(server, cache, 500, {})


def test_a_hub_that_cannot_be_reached_is_one_clear_line(server: LoopbackServer, cache: Path) -> None:
    server.server_close()
    with pytest.raises(
        InputError, match=f"'{REPO}' is not in the local cache and could not be fetched from the hub: "
    ) as caught:
        download(server, cache)
    assert "\n" not in str(caught.value)


def test_a_disk_that_fills_up_is_one_clear_line(
    server: LoopbackServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    put_model(server, REPO, FILES)
    monkeypatch.setattr(hub, "snapshot_download", full)
    with pytest.raises(InputError, match=r"local cache \(HF_HOME moves it\): \[Errno 28\] No space left"):
        download(server, cache)
