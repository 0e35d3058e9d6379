"""What `--model` names: a directory, a built-in model, or a model of the hub. Knows no tensors.

Runs in the command-line process, before anything else starts, so that a wrong name costs no waiting. Finding out what a
name is takes no network; only a hub id that the local cache does not hold whole does.
"""

import re
from pathlib import Path

import msgspec

from headrace.errors import InputError
from headrace.model.builtin import BUILTINS, builtin_named, ensure_builtin
from headrace.model.checkpoint import read_shape
from headrace.model.progress import Progress

HUB_ID = re.compile(r"(?!.*(--|\.\.|\.git$))\w([\w.-]{,94}\w)?/\w([\w.-]{,94}\w)?", re.ASCII)
"""Source: the hub's own rules for names, here with the organisation never left out."""
WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def locate_model(name: str, progress: Progress) -> Path:
    """The absolute path of a directory with weights, tokenizer and a configuration that we know how to compute.

    Built-in names are reserved: a directory called so is meant by a path with a slash. An existing directory goes
    before a hub id. Raises InputError, in one line: field `model`, or the field of config.json that is not known."""
    model = builtin_named(name)
    if model is not None:
        return ensure_builtin(progress, model=model)
    try:
        path = existing_path(name)
        if path is not None:
            return checked_directory(path)
    except OSError as error:
        raise InputError("model", f"must be a directory that can be read: {error}") from error
    if HUB_ID.fullmatch(name):
        return from_hub(name, progress)
    raise InputError(
        "model",
        f"must be an existing directory, a hub id (org/name), {' or '.join(BUILTINS)}, {name!r} is none of them",
    )


def served_name(name: str) -> str:
    """What clients call the model: its built-in name, the directory's own name, or the hub id."""
    model = builtin_named(name)
    if model is not None:
        return model.name
    path = existing_path(name)
    return name if path is None else path.resolve().name


def existing_path(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
    except RuntimeError:  # ~somebody whom this machine does not know
        return None
    return path if name and path.exists() else None


def checked_directory(path: Path) -> Path:
    if not path.is_dir():
        raise InputError("model", f"must be a directory in Hugging Face's form, {path} is a file")
    if missing := missing_files(path):
        raise InputError(
            "model", f"must be a directory with configuration, tokenizer and weights, {path} lacks {listed(missing)}"
        )
    read_shape(path)
    return path.resolve()


def from_hub(repo_id: str, progress: Progress) -> Path:
    # Function-local: huggingface_hub takes a quarter of a second, and most starts need none of it.
    from headrace.model.hub import cached_snapshot, download_snapshot

    cached = cached_snapshot(repo_id)
    if cached is not None and not missing_files(cached):
        return checked_directory(cached)
    return checked_directory(download_snapshot(repo_id, progress))


def missing_files(directory: Path) -> list[str]:
    """What a model's directory must have and this one has not; for weights in parts, each part that the index names."""
    missing = [name for name in ("config.json", "tokenizer.json") if not (directory / name).is_file()]
    if not (directory / WHOLE).is_file():
        parts = weight_files(directory / INDEX) if (directory / INDEX).is_file() else [WHOLE]
        missing += [name for name in parts if not (directory / name).is_file()]
    return missing


def listed(names: list[str]) -> str:
    """Three names at most: a model may have a hundred parts."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


class WeightIndex(msgspec.Struct, frozen=True):
    """What is read of an index: the file of each tensor."""

    weight_map: dict[str, str]


def weight_files(index: Path) -> list[str]:
    try:
        return sorted(set(msgspec.json.decode(index.read_bytes(), type=WeightIndex).weight_map.values()))
    except msgspec.DecodeError as error:
        raise InputError("model", f"{index} must be an index of weights: {error}") from error
