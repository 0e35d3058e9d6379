"""What one peer's hang costs the others, in rate. Runs alone."""

import os
import select
import signal
import statistics
import time
from contextlib import ExitStack

import pytest
from native_reader import ReaderProcess
from test_native_processes import Writer

from headrace.fabric.interface import PeerId, TransferDone, TransferId

BATCH = 64
WINDOW_S = 0.5
PAIRS = 7


class Load:
    """Keeps two batches under way to each of some peers, and counts the pages that completed."""

    def __init__(self, writer: Writer, peers: list[PeerId]) -> None:
        self._writer = writer
        self._peers = peers
        self._peer_of: dict[TransferId, PeerId] = {}

    def _add(self, peer: PeerId) -> None:
        self._peer_of[self._writer.write(peer, 1, BATCH)] = peer

    def rates(self, seconds: float) -> dict[PeerId, float]:
        """Pages per second to each peer, while all are loaded; nothing of it is under way afterwards."""
        for peer in self._peers * 2:
            self._add(peer)
        counts = dict.fromkeys(self._peers, 0)
        begin = time.monotonic()
        while (passed := time.monotonic() - begin) < seconds:
            for peer in self._drain(seconds - passed):
                counts[peer] += BATCH
                self._add(peer)
        while self._peer_of:
            self._drain(1.0)
        return {peer: count / passed for peer, count in counts.items()}

    def _drain(self, seconds: float) -> list[PeerId]:
        select.select([self._writer.fabric.event_fd], [], [], seconds)
        done = [event for event in self._writer.fabric.drain_events() if isinstance(event, TransferDone)]
        return [self._peer_of.pop(event.transfer) for event in done if event.transfer in self._peer_of]


@pytest.mark.timing
def test_a_stopped_decoder_takes_nothing_from_the_two_others() -> None:
    """Each healthy one runs at >= 0.95 of its rate with the third idle: medians of 7 interleaved pairs. Single pairs
    swing by a quarter on a shared machine and medians by a few per cent, so there are three tries at most; a peer that
    really held the others up would stop them for seconds (docs/fabric.md), in every try."""
    with ExitStack() as stack:
        writer = Writer("tcp")
        stack.callback(writer.fabric.close)
        readers = [stack.enter_context(ReaderProcess("tcp")) for _ in range(3)]
        peers = [writer.connect(reader) for reader in readers]
        load = Load(writer, peers[:2])
        for peer in peers:  # connections stand, memory is touched
            Load(writer, [peer]).rates(0.1)
        tries = []
        for _ in range(3):
            tries.append(median_ratios(writer, readers[2], peers, load))
            if min(tries[-1]) >= 0.95:
                return
        pytest.fail(f"rates beside a stopped third, over those beside an idle third: {tries}")


def median_ratios(writer: Writer, third: ReaderProcess, peers: list[PeerId], load: Load) -> list[float]:
    """Of each healthy peer: its rate while the third is stopped with writes queued, over its rate while it is idle."""
    ratios: list[list[float]] = [[], []]
    for _ in range(PAIRS):
        with_idle = load.rates(WINDOW_S)
        os.kill(third.process.pid, signal.SIGSTOP)
        held = writer.write(peers[2], 9, 500)
        with_stopped = load.rates(WINDOW_S)
        assert writer.done(held, seconds=0.0) is None, "the stopped one has taken 32 MB"
        os.kill(third.process.pid, signal.SIGCONT)
        assert writer.done(held) is not None
        for own, peer in zip(ratios, peers[:2], strict=True):
            own.append(with_stopped[peer] / with_idle[peer])
    return [statistics.median(own) for own in ratios]
