"""For the tests of the measurements: a server that lends its side, and processes that must be gone afterwards."""

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headrace.fabric.measure.server import MeasureServer, Patience
from headrace.fabric.measure.session import Place

TOKEN = "of the tests"


@contextmanager
def serving(patience: Patience | None = None) -> Iterator[Place]:
    """A server on an event loop of its own, in a thread."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = MeasureServer(listener, TOKEN, patience=patience)
        loop = asyncio.new_event_loop()
        task = loop.create_task(server.run())
        thread = threading.Thread(target=_run, args=(loop, task))
        thread.start()
        try:
            yield Place(host="127.0.0.1", port=listener.getsockname()[1], token=TOKEN)
        finally:
            loop.call_soon_threadsafe(task.cancel)
            thread.join()
            loop.close()


def _run(loop: asyncio.AbstractEventLoop, task: "asyncio.Task[None]") -> None:
    with suppress(asyncio.CancelledError):
        loop.run_until_complete(task)


def side_processes(parent: int) -> list[int]:
    """Of both kinds, started by that process and not buried yet."""
    return [int(folder.name) for folder in Path("/proc").glob("[0-9]*") if _is_side(folder, parent)]


def _is_side(process: Path, parent: int) -> bool:
    try:
        is_child = int((process / "stat").read_text().rpartition(")")[2].split()[1]) == parent
        return is_child and b".side import main" in (process / "cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return False


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))
