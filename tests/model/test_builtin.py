"""A built-in model's way into the cache: whole or not there, whatever breaks, and once for all processes."""

import errno
import json
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from builtin_process import Start
from safetensors import safe_open
from tiny_gguf import SPECIAL, ScriptedFetch, model_in, tiny_wheels
from tokenizers import Tokenizer

from headrace.errors import InputError
from headrace.model import builtin
from headrace.model.builtin import (
    BUILTIN_NAME,
    BUILTINS,
    GEMMA3,
    SMOLLM2,
    BuiltinModel,
    builtin_named,
    ensure_builtin,
    models_directory,
)
from headrace.model.manifest import MANIFEST
from headrace.model.progress import Progress, no_progress
from headrace.model.wheel import FetchFailed

FILES = [
    *("config.json", "generation_config.json", "model.safetensors"),
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
]


@dataclass(frozen=True)
class Cache:
    """A models directory of its own, and the wheel that a fetch brings."""

    models: Path
    model: BuiltinModel
    content: bytes

    @property
    def directory(self) -> Path:
        return self.models / self.model.name

    def ensure(self, *answers: bytes | BaseException, progress: Progress = no_progress) -> ScriptedFetch:
        """One start; without answers it must not fetch."""
        fetch = ScriptedFetch(list(answers))
        directory = ensure_builtin(progress, model=self.model, models=self.models, fetch=fetch)
        assert directory == self.directory and fetch.answers == []
        return fetch

    def check_whole(self) -> None:
        """By the contents, not by the manifest; and nothing lies around it."""
        assert sorted(path.name for path in self.directory.iterdir()) == sorted([*FILES, MANIFEST])
        with safe_open(self.directory / "model.safetensors", "np") as file:
            assert len(list(file.keys())) == 20
        assert json.loads((self.directory / "config.json").read_text())["num_hidden_layers"] == 2
        assert Tokenizer.from_file(str(self.directory / "tokenizer.json")).token_to_id("<|im_end|>") == 2
        assert self.names() == [".lock", self.model.name]

    def names(self) -> list[str]:
        return sorted(path.name for path in self.models.iterdir())


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    (content,) = tiny_wheels(tmp_path_factory.mktemp("wheel"), num_wheels=1)
    return content


@pytest.fixture
def cache(tmp_path: Path, wheel: bytes) -> Cache:
    return Cache(tmp_path / "headrace" / "models", model_in(wheel), wheel)


def test_the_first_start_makes_it_and_the_second_finds_it(cache: Cache) -> None:
    stages: list[str] = []
    cache.ensure(cache.content, progress=lambda stage, done, total: stages.append(stage))
    cache.check_whole()
    assert list(dict.fromkeys(stages)) == ["fetching", "converting tiny-llama"]
    cache.ensure()


def test_finding_it_writes_nothing(cache: Cache) -> None:
    """A cache that may only be read is enough, once the model is there."""
    cache.ensure(cache.content)
    (cache.models / ".lock").unlink()
    cache.ensure()
    assert cache.names() == [cache.model.name]


# ---- a file in several wheels ------------------------------------------------------------------------------------


@pytest.fixture
def in_three(tmp_path: Path) -> tuple[Cache, list[bytes]]:
    wheels = tiny_wheels(tmp_path, num_wheels=3)
    return Cache(tmp_path / "headrace" / "models", model_in(*wheels), b""), wheels


def test_a_file_in_several_wheels_is_put_together_in_their_order(in_three: tuple[Cache, list[bytes]]) -> None:
    cache, wheels = in_three
    assert len(wheels) == 3
    cache.ensure(*wheels)
    cache.check_whole()
    cache.ensure()


def test_of_several_wheels_only_the_broken_one_is_fetched_once_more(in_three: tuple[Cache, list[bytes]]) -> None:
    cache, (first, second, third) = in_three
    fetch = cache.ensure(first, second[:-1], second, third)
    assert fetch.cached == [True, True, False, True]
    cache.check_whole()


def test_a_wheel_that_never_comes_is_named_and_nothing_of_the_others_stays(
    in_three: tuple[Cache, list[bytes]],
) -> None:
    cache, (first, second, _) = in_three
    with pytest.raises(InputError, match=r"tiny-llama2==1\.0.* could not be fetched: pip says: no route"):
        cache.ensure(first, second, FetchFailed("pip says: no route", 0))
    assert cache.names() == [".lock"]


# ---- what the fetch brings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [100, -1], ids=["truncated", "a byte short"])
def test_a_broken_wheel_is_fetched_once_more_past_every_cache(cache: Cache, size: int) -> None:
    fetch = cache.ensure(cache.content[:size], cache.content)
    assert fetch.cached == [True, False]
    cache.check_whole()


def test_a_fetch_that_broke_off_is_tried_once_more(cache: Cache) -> None:
    cache.ensure(FetchFailed("pip says: connection reset", 100), cache.content)
    cache.check_whole()


def test_a_fetch_without_a_byte_is_not_tried_again(cache: Cache) -> None:
    with pytest.raises(
        InputError, match=r"tiny-llama==1\.0.* could not be fetched: pip says: no route; look at"
    ) as caught:
        cache.ensure(FetchFailed("pip says: no route", 0))
    assert caught.value.field == "model" and "\n" not in str(caught.value)
    assert cache.names() == [".lock"]


def test_a_wheel_that_stays_wrong_is_one_clear_error_and_leaves_nothing(cache: Cache) -> None:
    wrong = cache.content[:-1] + b"\xff"
    with pytest.raises(
        InputError, match=f"it must have the sha256 {cache.model.parts[0].wheel.sha256}, has [0-9a-f]{{64}};"
    ):
        cache.ensure(wrong, wrong)
    assert cache.names() == [".lock"]
    cache.ensure(cache.content)
    cache.check_whole()


# ---- what happens to it afterwards -----------------------------------------------------------------------------


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
@pytest.mark.parametrize("name", [*FILES, MANIFEST])
def test_a_damaged_directory_is_made_anew(cache: Cache, name: str, damage: Callable[[Path], None]) -> None:
    cache.ensure(cache.content)
    damage(cache.directory / name)
    cache.ensure(cache.content)
    cache.check_whole()
    cache.ensure()


def replace_by_a_file(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.touch()


def replace_by_a_dead_link(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.symlink_to("nowhere")


def empty(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.mkdir()


@pytest.mark.parametrize("damage", [replace_by_a_file, replace_by_a_dead_link, empty])
def test_whatever_stands_in_its_place_gives_way(cache: Cache, damage: Callable[[Path], None]) -> None:
    cache.ensure(cache.content)
    damage(cache.directory)
    cache.ensure(cache.content)
    cache.check_whole()


def test_a_directory_of_another_conversion_or_wheel_is_made_anew(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.ensure(cache.content)
    monkeypatch.setattr(builtin, "CONVERSION", builtin.CONVERSION + 1)
    cache.ensure(cache.content)
    (part,) = cache.model.parts
    newer = replace(part, wheel=replace(part.wheel, requirement="tiny-llama==2.0"))
    other = replace(cache, model=replace(cache.model, parts=(newer,)))
    other.ensure(cache.content)
    other.check_whole()


def test_a_directory_that_a_model_runs_from_can_be_replaced_under_it(cache: Cache) -> None:
    cache.ensure(cache.content)
    with safe_open(cache.directory / "model.safetensors", "np") as running:
        (cache.directory / "config.json").unlink()
        cache.ensure(cache.content)
        assert len(list(running.keys())) == 20
    cache.check_whole()


# ---- interrupts and deaths -------------------------------------------------------------------------------------


def count_of_calls(cache: Cache) -> int:
    calls: list[int] = []
    replace(cache, models=cache.models / "apart").ensure(cache.content, progress=lambda *call: calls.append(call[1]))
    shutil.rmtree(cache.models)
    return len(calls)


def test_an_interrupt_at_any_moment_leaves_nothing_behind(cache: Cache) -> None:
    for moment in range(count_of_calls(cache)):
        remaining = moment

        def interrupt(stage: str, done_bytes: int, total_bytes: int) -> None:
            nonlocal remaining
            if remaining == 0:
                raise KeyboardInterrupt
            remaining -= 1

        with pytest.raises(KeyboardInterrupt):
            cache.ensure(cache.content, progress=interrupt)
        assert cache.names() == [".lock"]
    cache.ensure(cache.content)
    cache.check_whole()


@pytest.mark.parametrize("moment", ["fetching", "converting", "seal", "rename"])
def test_a_process_killed_at_work_leaves_nothing_that_is_taken_for_whole(
    cache: Cache, tmp_path: Path, moment: str
) -> None:
    cache.ensure(cache.content)
    cut(cache.directory / "model.safetensors")
    with Start(cache.models, cache.content, moment, tmp_path) as start:
        assert start.process.wait() == -signal.SIGKILL
    assert [name for name in cache.names() if name.startswith(".work-")] != []
    if moment == "rename":  # it died after the one step that counts
        cache.ensure()
        (cache.directory / MANIFEST).unlink()
    cache.ensure(cache.content)
    cache.check_whole()


# ---- two at once -----------------------------------------------------------------------------------------------


def test_of_two_processes_one_makes_it_and_the_other_waits(cache: Cache, tmp_path: Path) -> None:
    with Start(cache.models, cache.content, "hold", tmp_path) as first:
        first.wait_for("fetching")
        with Start(cache.models, cache.content, "plain", tmp_path) as second:
            second.wait_for("waiting")
            first.go()
            first.wait_for("done")
            second.wait_for("done")  # without a fetch of its own
    cache.check_whole()


def test_a_waiting_process_takes_over_from_one_that_is_killed(cache: Cache, tmp_path: Path) -> None:
    with Start(cache.models, cache.content, "hold", tmp_path) as first:
        first.wait_for("fetching")
        with Start(cache.models, cache.content, "plain", tmp_path) as second:
            second.wait_for("waiting")
            first.process.kill()
            second.wait_for("fetching")
            second.wait_for("done")
    cache.check_whole()


# ---- no room, no right -----------------------------------------------------------------------------------------


def test_without_room_on_the_disk_nothing_is_fetched(cache: Cache) -> None:
    cramped = replace(cache, model=replace(cache.model, disk_bytes=1 << 60))
    with pytest.raises(
        InputError, match=r"needs \d+ MB free in .*models \(XDG_CACHE_HOME moves it\), there are \d+ MB"
    ):
        cramped.ensure()


def test_a_disk_that_fills_up_on_the_way_is_one_clear_error(cache: Cache) -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "/somewhere/wheel")
    with pytest.raises(InputError, match=r"writable in .*models \(XDG_CACHE_HOME .*No space left on device") as caught:
        cache.ensure(full)
    assert caught.value.field == "model" and "\n" not in str(caught.value)
    assert cache.names() == [".lock"]


def test_a_cache_that_cannot_be_written_is_one_clear_error(cache: Cache, tmp_path: Path) -> None:
    (tmp_path / "headrace").touch()
    with pytest.raises(InputError, match="Not a directory"):
        cache.ensure()


# ---- names and places ------------------------------------------------------------------------------------------


def test_the_cache_lies_where_xdg_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for value, expected in {
        str(tmp_path / "x"): tmp_path / "x",
        "relative": tmp_path / ".cache",
        "": tmp_path / ".cache",
    }.items():
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert models_directory() == expected / "headrace" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert models_directory() == tmp_path / ".cache" / "headrace" / "models"


def test_the_built_in_name_is_known_in_any_case() -> None:
    assert builtin_named("SmolLM2-135M-Instruct") is builtin_named(BUILTIN_NAME) is SMOLLM2
    assert builtin_named("Gemma3-270m") is GEMMA3
    assert builtin_named("smollm2") is None and builtin_named(f"./{BUILTIN_NAME}") is None
    assert all(name == name.casefold() for name in BUILTINS)


# ---- the real one ----------------------------------------------------------------------------------------------


def test_the_built_in_model_is_smollm2(smollm2: Path) -> None:
    config = json.loads((smollm2 / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"], config["head_dim"]) == (30, 576, 64)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["vocab_size"]) == (9, 3, 49152)
    assert (config["rope_theta"], config["tie_word_embeddings"], config["max_position_embeddings"]) == (1e5, True, 8192)
    with safe_open(smollm2 / "model.safetensors", "np") as file:
        assert len(list(file.keys())) == 30 * 9 + 2
        assert file.get_slice("model.embed_tokens.weight").get_shape() == [49152, 576]
        assert file.get_slice("model.layers.29.self_attn.k_proj.weight").get_dtype() == "BF16"


def test_the_built_in_tokenizer_cuts_as_smollm2_was_trained(smollm2: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    assert [tokenizer.token_to_id(token) for token in SPECIAL] == [0, 1, 2]
    assert tokenizer.encode("The year 2024").tokens == ["The", "Ġyear", "Ġ", "2", "0", "2", "4"]
    assert tokenizer.encode(" ²").tokens == ["Ġ", "Â²"]
    for text in ("def f(x):\n    return x\n", "你好 世界", "😀👩\u200d👧", "a   b\t\tc\r\n"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
