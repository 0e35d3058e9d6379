"""What every side is, whatever it is asked: a process that answers one question after another until nobody asks.

The half of whoever starts it (`start_process`), and the process's own (`asker`, `answer_all`). Its main thread reads
and answers; a second thread only waits for the questioner to go away: what waits for another side that has died never
ends by itself, and the process must not outlive the one that started it.
"""

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

import msgspec
import numpy as np

from headrace.errors import FabricError, InputError
from headrace.fabric.limits import wire
from headrace.fabric.limits.frames import read_frame, write_frame
from headrace.fabric.limits.placement import Offsets

GRACE_S = 1.0
"""How long an orderly end may take once the questioner is gone."""

Question = TypeVar("Question", contravariant=True)


class Side(Protocol[Question]):
    def answer(self, question: Question) -> wire.Message:
        """Raises InputError, FabricError and OSError, which are told as Refused."""
        ...

    def close(self) -> None: ...


class Given(Protocol):
    """What a process gets from the one that starts it: a struct that goes by its command line."""

    def descriptors(self) -> list[int]:
        """The open files in it."""
        ...


def start_process(
    module: str, stream: socket.socket, given: Given, *, errors: int | None = None
) -> subprocess.Popen[bytes]:
    """Runs the `main` of a module. Its questions come through `stream`, of which it has a copy. `errors` is a file for
    what it writes to stderr (None: it goes where ours goes)."""
    return subprocess.Popen(
        [
            *(sys.executable, "-c", f"from {module} import main; main()"),
            *(str(stream.fileno()), msgspec.json.encode(given).decode()),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        pass_fds=[stream.fileno(), *given.descriptors()],
    )


def asker() -> tuple[socket.socket, str]:
    """In the process: the stream that questions come by, and what was given as JSON."""
    # Ctrl-C reaches the whole group of a terminal: whoever started this ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return socket.socket(fileno=int(sys.argv[1])), sys.argv[2]


def answer_all(
    stream: socket.socket,
    side: Side[Question],
    decode: Callable[[bytes], Question],
    *,
    last_act: Callable[[], object] = lambda: None,
) -> None:
    """Until nobody asks any more, and closes the side. `last_act` is done before a process ends that does not notice.
    Ends the process at what is no question."""
    threading.Thread(target=_end_with, args=(stream, last_act), daemon=True).start()
    try:
        while (body := read_frame(stream)) is not None:
            write_frame(stream, msgspec.msgpack.encode(_answered(side, decode(body))))
    except OSError:
        pass  # the questioner is gone in the middle of something
    except ValueError as error:
        sys.exit(f"not a question: {error}")
    finally:
        side.close()


def offsets(wired: bytes) -> Offsets:
    """Of OffsetBytes. Raises InputError."""
    if len(wired) % 8:
        raise InputError("offsets", f"must be of 8 bytes each, are {len(wired)} bytes")
    return np.frombuffer(wired, dtype="<i8").astype(np.int64)


def _answered(side: Side[Question], question: Question) -> wire.Message:
    try:
        return side.answer(question)
    except InputError as error:
        return wire.refused(str(error).removeprefix(f"{error.field}: "), field=error.field)
    except FabricError as error:
        return wire.refused(error.text, call=error.call, code=error.code)
    except OSError as error:
        return wire.refused(error.strerror or str(error), call=type(question).__name__, code=error.errno or 0)


def _end_with(stream: socket.socket, last_act: Callable[[], object]) -> None:
    """In a thread: when the questioner is gone and the main thread does not notice, ends the process."""
    gone = select.poll()
    gone.register(stream, select.POLLRDHUP)
    gone.poll()
    time.sleep(GRACE_S)
    last_act()
    os._exit(1)
