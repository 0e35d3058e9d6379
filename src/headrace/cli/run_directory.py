"""Where sockets lie: a folder of this user alone, found alike by every process that the user starts.

`$XDG_RUNTIME_DIR/headrace`, or `headrace-UID` in the folder for temporary files. What lies in it is reachable by its
owner only, which is all the protection that control messages have.
"""

import logging
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.cli.network import require_socket_path
from headrace.errors import InputError

CONTROL_SOCKET = "control.sock"
SERVE_PREFIX = "serve-"

_log = logging.getLogger(__name__)


def user_directory() -> Path:
    """Made when it is missing. Raises InputError where it is not ours alone."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if Path(runtime).is_absolute() and os.access(runtime, os.W_OK | os.X_OK):
        folder = Path(runtime) / "headrace"
    else:
        folder = Path(tempfile.gettempdir()) / f"headrace-{os.geteuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise InputError("XDG_RUNTIME_DIR", f"must be a folder for sockets: {error}") from error
    # Anybody may make a folder of that name in /tmp, and then listen to what we say there.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise InputError("XDG_RUNTIME_DIR", f"{folder} must be a folder that belongs to you and nobody else may enter")
    return folder


def default_control() -> str:
    """Where a gateway and the instances of one user meet when they are told nothing else."""
    path = user_directory() / CONTROL_SOCKET
    require_socket_path("XDG_RUNTIME_DIR", path)
    return f"ipc://{path}"


def running_control() -> str:
    """Where the one gateway of this user listens, or any of its one `serve`. Raises InputError."""
    folder = user_directory()
    places = (folder, *sorted(folder.glob(f"{SERVE_PREFIX}*")))
    found = [path for place in places if (path := _first_listened_at(place)) is not None]
    if not found:
        raise InputError("control", f"must be said: no gateway of this user listens in {folder}")
    if len(found) > 1:
        raise InputError("control", f"must be said, one of {', '.join(f'ipc://{path}' for path in found)}")
    return f"ipc://{found[0]}"


def _first_listened_at(place: Path) -> Path | None:
    return next((path for path in sorted(place.glob("control*.sock")) if _is_listened_at(path)), None)


def _is_listened_at(path: Path) -> bool:
    """A socket's file outlives a process that was killed."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:
            return True  # its backlog is full
        except OSError:
            return False
    return True


def shared_weights_directory() -> Path | None:
    """Where instances of one user find each other's packed weights; None where there is no folder that is ours alone,
    which only those need who rely on it."""
    try:
        return user_directory() / "weights"
    except InputError as error:
        _log.info("weights are not shared with other processes: %s", error)
        return None


@contextmanager
def private_directory() -> Iterator[Path]:
    """For the processes of one `serve`; removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix=SERVE_PREFIX, dir=user_directory()))
    try:
        require_socket_path("XDG_RUNTIME_DIR", folder / CONTROL_SOCKET)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
