"""A model of the Hugging Face hub, by its id: from the local cache where it lies, else downloaded.

Owns which files of a repository are wanted and what a failed download means to the user. The cache, its layout and the
download itself are huggingface_hub's. Runs in the command-line process; huggingface_hub downloads with its own threads,
so progress is reported from them.
"""

import fnmatch
import logging
import threading
from pathlib import Path

import httpx2  # huggingface_hub's client, whose errors it lets through
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]  # documented, but not marked as exported

from headrace.errors import InputError
from headrace.model.checkpoint import read_shape
from headrace.model.progress import Progress, no_progress

WANTED = (
    *("config.json", "generation_config.json"),
    *("model.safetensors", "model.safetensors.index.json", "model-*.safetensors"),
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
)
ANSWER_S = 3.0
"""How long the hub may take for the first answer: a network that swallows packets must not hold up the start."""


def cached_snapshot(repo_id: str, *, cache: Path | None = None) -> Path | None:
    """The newest snapshot in the local cache, or None. It may lack files: an older download that broke off."""
    try:
        return Path(snapshot_download(repo_id, cache_dir=cache, allow_patterns=list(WANTED), local_files_only=True))
    except OSError:  # LocalEntryNotFoundError is one; a cache that cannot be read is none either
        return None


def download_snapshot(
    repo_id: str, progress: Progress, *, cache: Path | None = None, endpoint: str | None = None
) -> Path:
    """The snapshot's directory, after a download of what the cache lacks.

    Raises InputError: no such repository, no access to it, no network, no room on the disk; not in a form that can be
    loaded, or a configuration that is not known."""
    # Its warnings would come between our progress and our one line of error.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        sizes = wanted_sizes(repo_id, endpoint)
        total_bytes = max(1, sum(sizes.values()))
        stage = f"fetching {repo_id}"
        # First, so that gigabytes are not fetched of what cannot be computed.
        quiet = counting_bar(stage, total_bytes, no_progress)
        config = hf_hub_download(repo_id, "config.json", cache_dir=cache, endpoint=endpoint, tqdm_class=quiet)
        read_shape(Path(config).parent)
        progress(stage, 0, total_bytes)
        directory = snapshot_download(
            repo_id,
            cache_dir=cache,
            endpoint=endpoint,
            allow_patterns=list(WANTED),
            tqdm_class=counting_bar(stage, total_bytes, progress),
        )
        progress(stage, total_bytes, total_bytes)
    except (httpx2.HTTPError, OSError, RuntimeError) as error:  # RuntimeError: of its native downloader
        raise InputError("model", explanation(repo_id, error)) from error
    return Path(directory)


def wanted_sizes(repo_id: str, endpoint: str | None) -> dict[str, int]:
    """Bytes of each wanted file, when they make a model."""
    info = HfApi(endpoint=endpoint).model_info(repo_id, files_metadata=True, timeout=ANSWER_S)
    sizes = {
        file.rfilename: file.size or 0
        for file in info.siblings or []
        if any(fnmatch.fnmatchcase(file.rfilename, pattern) for pattern in WANTED)
    }
    weights = ("model.safetensors", "model.safetensors.index.json")
    missing = [name for name in ("config.json", "tokenizer.json") if name not in sizes]
    if not any(name in sizes for name in weights):
        missing.append(" or ".join(weights))
    if missing:
        raise InputError("model", f"must have {', '.join(missing)}, which {repo_id!r} on the hub lacks")
    return sizes


def explanation(repo_id: str, error: Exception) -> str:
    """What the user reads, in one line: what would be right, and what happened."""
    if isinstance(error, GatedRepoError):
        return f"{repo_id!r} asks for its conditions to be accepted on the hub first, then `hf auth login` here"
    if isinstance(error, RepositoryNotFoundError):
        return f"must be on the hub, {repo_id!r} is not (or it is private: `hf auth login`, and try again)"
    first_line = (str(error).splitlines() or [type(error).__name__])[0]
    of_the_hub = isinstance(error, HfHubHTTPError | LocalEntryNotFoundError | ConnectionError)
    if isinstance(error, OSError) and error.errno is not None and not of_the_hub:
        return f"{repo_id!r} could not be written to the local cache (HF_HOME moves it): {first_line}"
    return f"{repo_id!r} is not in the local cache and could not be fetched from the hub: {first_line}"


def counting_bar(stage: str, total_bytes: int, progress: Progress) -> type[tqdm]:
    """A progress bar class for huggingface_hub that draws nothing and reports bytes.

    It is made once for bytes received, once for bytes written and once for files; which of the first two moves depends
    on the way the bytes come, so the further one counts."""
    lock = threading.Lock()
    done_bytes = 0

    class CountingBar(tqdm):
        def __init__(self, *args: object, **kwargs: object) -> None:
            self._counts_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal done_bytes
            with lock:
                self.n += n or 0
                if self._counts_bytes and done_bytes < self.n <= total_bytes:
                    done_bytes = int(self.n)
                    progress(stage, done_bytes, total_bytes)
            return None

    return CountingBar
