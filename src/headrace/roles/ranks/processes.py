"""The rank processes of an instance, as its lead has them: started, told to load and to compute, ended.

Owns the processes, the sockets to them, the memory that steps are written into and the folder where all ranks meet. The
lead is rank 0 itself: `model` and `runner` have its part. Started on the main thread (the kernel ends a
rank with the thread that started it), then used on the model thread; who dies or hangs meanwhile is the watch's to say.
"""

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from headrace.engine.step_memory import StepLimits, StepMemory
from headrace.errors import InputError, RankLost
from headrace.kvcache.layout import PoolLayout
from headrace.roles.options import InstanceOptions
from headrace.roles.ranks.messages import Compute, Computed, Failed, Here, Loaded, RankTask, Refused, receive, send
from headrace.roles.ranks.model import COLLECTIVE_S
from headrace.roles.ranks.watch import RankWatch
from headrace.roles.stopping import signals_held

_log = logging.getLogger(__name__)


class RankProcesses:
    """`links` are the sockets, of ranks 1, 2, .. in order. To send to one that is gone is no failure: it gives no
    answer either."""

    def __init__(
        self,
        links: Sequence[socket.socket],
        watch: RankWatch,
        *,
        steps: StepMemory,
        meeting_points: "TemporaryDirectory[str]",
    ) -> None:
        self.steps = steps
        self._meeting_points = meeting_points
        self._links = links
        self._watch = watch

    @property
    def meeting_points(self) -> Path:
        return Path(self._meeting_points.name)

    def begin(self, tasks: Sequence[RankTask]) -> None:
        """Tell them what they are, and wait until all can meet. Raises RankLost."""
        for link, task in zip(self._links, tasks, strict=True):
            with suppress(OSError):
                send(link, task)
        self._expect(Here)

    def wait_loaded(self, memory_fd: int) -> None:
        """Give them the KV memory, and wait until they can compute. Raises RankLost, and InputError where one cannot
        load its part of the model."""
        for link in self._links:
            with suppress(OSError):
                socket.send_fds(link, [b"."], [memory_fd])
        self._expect(Loaded)
        self._meeting_points.cleanup()  # all have met; nothing is left of it if this process is killed

    def begin_step(self) -> None:
        """They compute what lies in the step memory."""
        for link in self._links:
            with suppress(OSError):
                send(link, Compute())

    def end_step(self) -> None:
        """Wait for all of them. Raises RankLost, and InputError for logits that are no numbers."""
        self._expect(Computed, within_s=COLLECTIVE_S)

    def lost(self, otherwise: str) -> RankLost:
        """Why a step could not be computed, as far as is known."""
        return self._watch.loss(otherwise)

    def close(self) -> None:
        """Whatever they do. Idempotent."""
        self._watch.close()
        for link in self._links:
            link.close()

    def _expect(self, kind: type[Here | Loaded | Computed], *, within_s: float | None = None) -> None:
        """Hears all of them before it raises what one has refused: the others are in step, and stay so."""
        refusal = None
        for rank, link in enumerate(self._links, start=1):
            link.settimeout(within_s)
            try:
                answer = receive(link)
            except TimeoutError:
                raise self.lost(f"rank {rank} has not answered for {within_s:g} s") from None
            match answer:
                case Refused(field=field, text=text):
                    refusal = refusal or InputError(field, f"{text} (rank {rank})")
                case Failed(text=text):
                    raise self.lost(f"rank {rank} failed: {text}")
                case message if not isinstance(message, kind):
                    raise self.lost(f"rank {rank} has ended")
        if refusal is not None:
            raise refusal

    def __repr__(self) -> str:
        return f"RankProcesses({len(self._links)}, {self._watch!r})"


@contextmanager
def open_rank_processes(
    options: InstanceOptions,
    *,
    layout: PoolLayout,
    max_model_len: int,
    fingerprint: str,
    on_lost: Callable[[RankLost], None],
) -> Iterator[RankProcesses]:
    """Ranks 1, 2, ..; they are here when this returns, and gone when the context ends. `on_lost` is called on another
    thread, when one is lost. Raises RankLost, OSError."""
    limits = StepLimits.of(
        chunk_tokens=options.chunk_tokens,
        max_running=options.max_running,
        max_model_len=max_model_len,
        page_size=options.page_size,
    )
    meeting_points = TemporaryDirectory(prefix="headrace-ranks-")
    with meeting_points, closing(StepMemory(limits, options.dp)) as steps, ExitStack() as exits:
        tasks = [
            RankTask(
                options=options,
                rank=rank,
                fingerprint=fingerprint,
                layout=layout,
                limits=limits,
                meeting_points=meeting_points.name,
            )
            for rank in range(1, options.num_ranks)
        ]
        with signals_held():
            started = [_start(task, steps.fd) for task in tasks]
            watch = RankWatch([one.process for one in started], [one.pulse for one in started], on_lost=on_lost)
            ranks = RankProcesses([one.link for one in started], watch, steps=steps, meeting_points=meeting_points)
            exits.callback(ranks.close)
        ranks.begin(tasks)
        yield ranks


@dataclass(frozen=True, slots=True)
class _Started:
    process: "subprocess.Popen[bytes]"
    link: socket.socket
    pulse: int  # to hear


def _start(task: RankTask, steps_fd: int) -> _Started:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    heard, beaten = os.pipe()
    level = logging.getLevelName(_log.getEffectiveLevel()).lower()
    words = {
        "name": f"{task.options.name}/{task.rank}",
        "log-level": level,
        "lead-pid": os.getpid(),
        "lead-fd": theirs.fileno(),
        "pulse-fd": beaten,
        "steps-fd": steps_fd,
    }
    arguments = [word for name, value in words.items() for word in (f"--{name}", str(value))]
    try:
        # In our process group, which a supervisor kills as a whole; so it hears Ctrl-C as well, and leaves it to us.
        process = subprocess.Popen(
            (sys.executable, "-P", "-m", "headrace", "rank", *arguments),
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), beaten, steps_fd),
        )
    finally:
        theirs.close()
        os.close(beaten)
    return _Started(process, ours, heard)
