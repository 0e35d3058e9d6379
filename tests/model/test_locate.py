"""What `--model` may name, and what is said of everything else."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from loopback_server import CONFIG, FILES, REPO, put_model, serving

from headrace.errors import InputError
from headrace.model import locate
from headrace.model.builtin import BUILTINS, BuiltinModel
from headrace.model.locate import HUB_ID, locate_model, served_name
from headrace.model.progress import Progress, no_progress

SRC = Path(locate.__file__).parents[2]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    directory = tmp_path / "my-model"
    directory.mkdir()
    for name, body in FILES.items():
        (directory / name).write_bytes(body)
    return directory


def refusal(name: object) -> str:
    with pytest.raises(InputError) as caught:
        locate_model(str(name), no_progress)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_directory_is_found_by_any_path_to_it(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(directory.parent)
    monkeypatch.setenv("HOME", str(directory.parent))
    (directory.parent / "link").symlink_to(directory)
    for name in (str(directory), "my-model", "./my-model/", "~/my-model", "link"):
        assert locate_model(name, no_progress) == directory
        assert served_name(name) == "my-model"
    monkeypatch.chdir(directory)
    assert (locate_model(".", no_progress), served_name(".")) == (directory, "my-model")


def test_an_existing_directory_goes_before_a_hub_id(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(directory.parent.parent)
    name = f"{directory.parent.name}/my-model"
    assert HUB_ID.fullmatch(name)
    assert locate_model(name, no_progress) == directory


@pytest.mark.parametrize("name", [*BUILTINS, "SmolLM2-135M-Instruct", "Gemma3-270M"])
def test_the_built_in_name_is_the_built_in_model_whatever_lies_around(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    asked: list[Progress] = []

    def ensured(progress: Progress, *, model: BuiltinModel) -> Path:
        asked.append(progress)
        return Path("/cache") / model.name

    monkeypatch.setattr(locate, "ensure_builtin", ensured)
    assert locate_model(name, no_progress) == Path("/cache") / name.casefold() and asked == [no_progress]
    assert served_name(name) == name.casefold()
    assert f"{name} lacks config.json" in refusal(f"./{name}")


@pytest.mark.parametrize("name", FILES)
def test_a_directory_that_lacks_a_file_is_refused_by_that_file(directory: Path, name: str) -> None:
    (directory / name).unlink()
    assert f"must be a directory with configuration, tokenizer and weights, {directory} lacks {name}" in refusal(
        directory
    )


def test_weights_in_parts_are_all_looked_for(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {f"layer.{n}": f"part-{n % 5}" for n in range(10)}}))
    assert f"{directory} lacks part-0, part-1, part-2 and 2 more" in refusal(directory)
    for n in range(5):
        (directory / f"part-{n}").touch()
    assert locate_model(str(directory), no_progress) == directory
    index.write_text('{"weight_map": 3}')
    assert f"{index} must be an index of weights" in refusal(directory)


def test_a_configuration_we_do_not_know_is_refused_at_once(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["Mamba"]}))
    assert "Mamba" in refusal(directory)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "",
            "nothing",
            "./nothing",
            "/nothing/here",
            "~nobody-here/model",
            "a/b/c",
            "org/",
            "/",
            "smollm2",
            "x" * 300,
        ),
        *("org/na--me", "org/name.git", "-org/name", "org/name.", "some org/name", "örg/name"),
    ],
)
def test_a_name_that_can_be_nothing_is_refused_without_a_look_at_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(locate, "from_hub", lambda *_: pytest.fail("asks the hub"))
    said = refusal(name)
    if name == "/":
        assert "/ lacks config.json" in said
    elif len(name) > 255:
        assert "must be a directory that can be read: " in said
    else:
        names = "smollm2-135m-instruct or gemma3-270m"
        assert f"must be an existing directory, a hub id (org/name), {names}, {name!r} is none" in said


def test_a_file_is_no_model(directory: Path) -> None:
    assert "must be a directory in Hugging Face's form" in refusal(directory / "model.safetensors")


@pytest.mark.parametrize("name", ["org/name", "meta-llama/Llama-3.2-1B", "a/b", "0_o/x.y"])
def test_hub_ids_are_told_from_paths(name: str) -> None:
    assert HUB_ID.fullmatch(name)
    assert served_name(name) == name


# ---- through the hub, as a process would ------------------------------------------------------------------------

LOCATE = """
import sys
from headrace.errors import InputError
from headrace.model.locate import locate_model
stages = []
try:
    print(locate_model(sys.argv[1], lambda *call: stages.append(call)))
except InputError as error:
    print(error)
print(len(stages), *(name for name in ("torch", "transformers", "gguf", "huggingface_hub") if name in sys.modules))
"""


def located(name: str, **environment: str) -> list[str]:
    """Both lines that a process of its own prints; on stderr it must say nothing."""
    proxyless = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    environment = {**proxyless, "PYTHONPATH": str(SRC), **environment}
    command = [sys.executable, "-W", "error", "-c", LOCATE, name]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert answer.stderr == ""
    return answer.stdout.splitlines()


def test_a_hub_id_is_fetched_once_and_then_found_without_a_hub(tmp_path: Path) -> None:
    home = {"HF_HOME": str(tmp_path)}
    with serving() as server:
        put_model(server, REPO, FILES)
        directory, loaded = located(REPO, HF_ENDPOINT=server.url, **home)
        assert {path.name: path.read_bytes() for path in Path(directory).iterdir()} == FILES
        assert int(loaded.split()[0]) >= 2 and loaded.split()[1:] == ["huggingface_hub"]
    assert located(REPO, HF_ENDPOINT=server.url, **home) == [directory, "0 huggingface_hub"]
    said, _ = located("some-org/other", HF_ENDPOINT=server.url, **home)
    assert "'some-org/other' is not in the local cache and could not be fetched from the hub: " in said
    said, _ = located("some-org/other", HF_HUB_OFFLINE="1", **home)
    assert "could not be fetched" in said and "HF_HUB_OFFLINE" in said


def test_a_directory_is_found_with_nothing_heavy_loaded(directory: Path) -> None:
    assert located(str(directory)) == [str(directory), "0"]
