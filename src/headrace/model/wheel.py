"""One wheel from the package index, fetched by pip. Knows nothing of what is in it, nor of models.

pip does it because only pip knows which index, proxy, certificates and credentials this machine uses. It runs as a
child process; the caller's thread waits for it and reports how many bytes have arrived.
"""

import importlib.util
import logging
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from headrace.errors import HeadraceError, InputError
from headrace.model.manifest import sha256_of
from headrace.model.progress import Progress

logger = logging.getLogger(__name__)

POLL_S = 0.1
PIP = (
    "import ctypes, runpy; ctypes.CDLL(None).prctl(1, 15); runpy.run_module('pip', run_name='__main__', alter_sys=True)"
)
"""pip in a process that the kernel ends with ours (PR_SET_PDEATHSIG, SIGTERM), however ours ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """`requirement` as pip takes it (`name==version`), and what the one file must be."""

    requirement: str
    num_bytes: int
    sha256: str


class FetchFailed(HeadraceError):
    """The file did not come, and why; `num_bytes` of it had. Between a `Fetch` and `fetch_checked`, no further."""

    def __init__(self, text: str, num_bytes: int) -> None:
        super().__init__(text)
        self.num_bytes = num_bytes


class Fetch(Protocol):
    def __call__(self, wheel: Wheel, folder: Path, progress: Progress, *, cached: bool) -> Path:
        """The wheel's file, somewhere in the empty `folder`; `cached`: it may come from what was fetched earlier.
        Raises FetchFailed."""
        ...


def fetch_checked(wheel: Wheel, folder: Path, progress: Progress, fetch: Fetch) -> Path:
    """The wheel in `folder`, its bytes being those that `sha256` names. Raises InputError.

    A file that broke off or is another one is fetched once more, past every cache: a cache that holds the wrong bytes
    would give them again. When not one byte came (no network, no such index) it is not worth a second wait."""
    for attempt in (1, 2):
        place = folder / f"attempt-{attempt}"
        place.mkdir()
        try:
            path = fetch(wheel, place, progress, cached=attempt == 1)
            num_bytes, found = path.stat().st_size, sha256_of(path)
            if found == wheel.sha256:
                return path
            problem = f"it must have the sha256 {wheel.sha256}, has {found}"
        except FetchFailed as failed:
            num_bytes, problem = failed.num_bytes, str(failed)
        shutil.rmtree(place)
        if not num_bytes:
            break
        if attempt == 1:
            logger.warning("%s, once more: %s", wheel.requirement, problem)
    raise InputError(
        "model",
        f"{wheel.requirement}, which carries a built-in model, could not be fetched: {problem}; look at the network "
        "and at `pip config list`, or give the directory of a model",
    )


def fetch_with_pip(wheel: Wheel, folder: Path, progress: Progress, *, cached: bool) -> Path:
    """A `Fetch` through this interpreter's pip, with whatever configuration pip has."""
    if importlib.util.find_spec("pip") is None:
        raise FetchFailed(f"{sys.executable} has no pip (`python -m ensurepip` installs it)", 0)
    arriving, arrived = folder / "tmp", folder / "wheel"
    arriving.mkdir()
    with (folder / "stderr").open("wb") as stderr:
        process = subprocess.Popen(
            pip_command(wheel, arrived, cached=cached),
            env={**os.environ, "TMPDIR": str(arriving)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )
    try:
        status = wait_and_report(process, wheel, folder, progress)
    finally:  # only an interrupt comes here while pip still runs
        process.kill()
        process.wait()
    wheels = list(arrived.glob("*.whl"))
    if status != 0 or len(wheels) != 1:
        raise FetchFailed(last_word((folder / "stderr").read_text(errors="replace"), status), largest_wheel(folder))
    return wheels[0]


def pip_command(wheel: Wheel, arrived: Path, *, cached: bool) -> list[str]:
    return [
        *(sys.executable, "-P", "-c", PIP, "download", wheel.requirement),  # -P: a folder named pip is no pip
        *("--no-deps", "--only-binary=:all:", "--dest", str(arrived)),
        # One retry: without a network the answer is due in a second or two, not after pip's five growing pauses.
        *("--retries=1", "--no-input", "--disable-pip-version-check", "--progress-bar=off", "--quiet"),
        *(() if cached else ("--no-cache-dir",)),
    ]


def wait_and_report(process: subprocess.Popen[bytes], wheel: Wheel, folder: Path, progress: Progress) -> int:
    """pip's exit status. pip can draw bars but not report, so what is measured is the file that it writes."""
    stage = f"fetching {wheel.requirement}"
    progress(stage, 0, wheel.num_bytes)
    done_bytes = 0
    while True:
        try:
            status = process.wait(timeout=POLL_S)
        except subprocess.TimeoutExpired:
            done_bytes = max(done_bytes, min(largest_wheel(folder), wheel.num_bytes))
            progress(stage, done_bytes, wheel.num_bytes)
        else:
            if status == 0:
                progress(stage, wheel.num_bytes, wheel.num_bytes)
            return status


def largest_wheel(folder: Path) -> int:
    """Bytes of the wheel on its way: pip writes it under its own name, and copies it once."""
    sizes = [0]
    for path in folder.rglob("*.whl"):
        try:
            sizes.append(path.stat().st_size)
        except FileNotFoundError:  # pip moves it while we look
            continue
    return max(sizes)


def last_word(text: str, status: int) -> str:
    """The line of pip's errors that says most."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return "pip says: " + (errors or lines or [f"nothing (exit status {status})"])[-1]
