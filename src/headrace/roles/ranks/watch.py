"""Whether an instance's rank processes live: a thread that hears their pulses, and says of the first that has none how
it ended.

Owns the reading ends of the pulses, and the processes until they are reaped. A pulse is a pipe into which a thread of
the rank writes twice a second, whatever the rank computes; it ends with the process. So a rank that dies is known at
once, and one that hangs as a whole after SILENCE_S, also while the lead's model thread waits for it.
"""

import os
import select
import subprocess
import threading
import time
from collections.abc import Callable, Sequence

from headrace.errors import RankLost
from headrace.roles.exit_status import described
from headrace.roles.ranks.messages import BEAT_S

SILENCE_S = 10.0
"""A rank that was silent for so long hangs. Far above a beat: two busy cores, and disks, keep a thread waiting."""

START_S = 120.0
"""The same before its first beat, until which it is an interpreter that loads its modules."""

WORDS_S = 2.0
"""A step fails where one rank has died, and the thread that notices how may come a little later."""

_READ_BYTES = 4096


class RankWatch:
    """The processes of ranks 1, 2, .. and the `pulses` to hear, which it takes over. `on_lost` is called on the watch's
    thread, once."""

    def __init__(
        self,
        processes: "Sequence[subprocess.Popen[bytes]]",
        pulses: Sequence[int],
        *,
        on_lost: Callable[[RankLost], None],
    ) -> None:
        self._processes = processes
        self._ranks = {pulse: rank for rank, pulse in enumerate(pulses, start=1)}
        self._on_lost = on_lost
        self._loss: RankLost | None = None
        self._is_over = threading.Event()
        self._is_closing = False
        self._thread = threading.Thread(target=self._watch, name="rank watch", daemon=True)
        self._thread.start()

    def loss(self, otherwise: str) -> RankLost:
        """Why a step could not be computed: the rank that has ended, or what whoever asks has seen of it."""
        self._is_over.wait(WORDS_S)
        return self._loss or RankLost(otherwise)

    def close(self) -> None:
        """End all ranks, however they are, and reap them: they have nothing to give back that does not go with them.
        Idempotent."""
        self._is_closing = True
        self._is_over.set()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        self._thread.join()
        for pulse in self._ranks:
            os.close(pulse)
        self._ranks = {}

    def _watch(self) -> None:
        ears = select.poll()
        for pulse in self._ranks:
            ears.register(pulse, select.POLLIN)
        until = dict.fromkeys(self._ranks, time.monotonic() + START_S)
        while not self._is_closing:
            now = time.monotonic()  # before it listens: had we been stopped ourselves, their beats are there
            for pulse, _ in ears.poll(BEAT_S * 1e3):
                if not os.read(pulse, _READ_BYTES):
                    self._lose(pulse, described(self._process(pulse).wait()))
                    return
                until[pulse] = time.monotonic() + SILENCE_S
            for pulse, silent_at in until.items():
                if now >= silent_at:
                    self._lose(pulse, "does nothing any more: it is stopped, or hangs")
                    return

    def _lose(self, pulse: int, how: str) -> None:
        if self._is_closing:
            return
        rank, pid = self._ranks[pulse], self._process(pulse).pid
        self._loss = RankLost(f"rank {rank} of {len(self._processes) + 1} (process {pid}) {how}")
        self._is_over.set()
        self._on_lost(self._loss)

    def _process(self, pulse: int) -> "subprocess.Popen[bytes]":
        return self._processes[self._ranks[pulse] - 1]

    def __repr__(self) -> str:
        return f"RankWatch({len(self._processes)} processes, {self._loss or 'all live'})"
