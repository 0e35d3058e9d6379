"""What one loopback endpoint still has to post to one peer, and the transfers it belongs to.

Owns write lists, their places and their gates; it knows neither memory nor network. Pure tables, no clock.

    at_once   runs without a gate                         posted first, in order of submission
    gated     runs of programs, step by step, by layer    the head waits for the layer counter, all behind it too
    lasts     aux writes                                  each waits for its counter and for its own transfer

A run is one layer of one `PageWrites` (or one single write): it keeps its place when the queue is full.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from headrace.errors import InputError
from headrace.fabric.interface import (
    Descriptor,
    Imm,
    LastWrite,
    Pages,
    PageWrites,
    PeerId,
    TransferDone,
    TransferId,
)

MAX_LAYERS = 1 << 16  # the message seed has 16 bits of layer
WINDOW = 64  # outstanding writes per peer (PROTOCOL, "Progress")


@dataclass(slots=True, kw_only=True, eq=False)
class Transfer:
    """A write list from `open_transfer` until its TransferDone was drained."""

    id: TransferId
    peer: PeerId
    imm: Imm
    descriptor: Descriptor
    digests: list[int]
    num_queued: int = 0  # page and single writes, not the last one
    num_posted: int = 0
    num_outstanding: int = 0
    num_failed: int = 0
    last: LastWrite | None = None
    last_gate: int = 0
    ended: bool = False  # by the caller: nothing may be added
    given_up: bool = False  # nothing more is posted
    told: bool = False
    code: int = 0
    text: str = ""

    @property
    def posts_more(self) -> bool:
        return not self.given_up and (self.num_queued > 0 or self.last is not None)

    @property
    def is_over(self) -> bool:
        """Nothing is posted any more: its list was given up, or ended and posted to its end."""
        return (self.ended or self.given_up) and not self.posts_more

    @property
    def is_done(self) -> bool:
        return self.is_over and self.num_outstanding == 0

    def give_up(self) -> None:
        """Drop what was not posted; a list that was ended and posted to its end stays complete."""
        if not self.ended or self.posts_more:
            self.given_up = True
            self.num_queued, self.last = 0, None
        self.ended = True

    def fail(self, code: int, text: str) -> None:
        """Remember the first error."""
        if self.code == 0:
            self.code, self.text = code, text

    def result(self) -> TransferDone:
        return TransferDone(
            transfer=self.id,
            num_posted=self.num_posted,
            num_failed=self.num_failed,
            complete=not self.given_up,
            code=self.code,
            text=self.text,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class Run:
    """Writes of one length and layer, posted in order when the layer counter reaches `gate`."""

    transfer: Transfer
    gate: int
    layer: int
    route: int
    length: int
    src: list[int]
    dst: list[int]
    positions: list[int]
    place: int = 0

    @property
    def is_spent(self) -> bool:
        return self.transfer.given_up or self.place == len(self.src)


@dataclass(slots=True)
class Outbox:
    """The queues of one peer."""

    messages: deque[bytes] = field(default_factory=deque)
    num_message_bytes: int = 0
    at_once: deque[Run] = field(default_factory=deque)
    gated: deque[Run] = field(default_factory=deque)
    lasts: list[Transfer] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.messages or self.at_once or self.gated or self.lasts)

    def add_message(self, message: bytes) -> None:
        self.messages.append(message)
        self.num_message_bytes += len(message)

    def take_message(self) -> bytes:
        message = self.messages.popleft()
        self.num_message_bytes -= len(message)
        return message

    def drop_messages(self) -> None:
        self.messages.clear()
        self.num_message_bytes = 0

    def add(self, run: Run) -> None:
        """Runs of one program come in order of their gates, programs in order of their steps."""
        if run.src:
            run.transfer.num_queued += len(run.src)
            (self.gated if run.gate else self.at_once).append(run)

    def add_last(self, transfer: Transfer, last: LastWrite, gate: int) -> None:
        transfer.last, transfer.last_gate = last, gate
        self.lasts.append(transfer)

    def next_run(self, counter: int) -> Run | None:
        """The run whose next write may be posted now; its place moves only with `advance`."""
        for queue in (self.at_once, self.gated):
            while queue and queue[0].is_spent:
                queue.popleft()
            if queue and queue[0].gate <= counter:
                return queue[0]
        return None

    def advance(self, run: Run) -> None:
        run.place += 1
        run.transfer.num_queued -= 1

    def next_last(self, counter: int) -> Transfer | None:
        """A transfer whose last write may be posted now: everything before it was posted."""
        if self.lasts:
            self.lasts = [transfer for transfer in self.lasts if transfer.last is not None]
        for transfer in self.lasts:
            if transfer.num_queued == 0 and transfer.last_gate <= counter:
                return transfer
        return None


def checked_shape(writes: PageWrites, max_layers: int) -> None:
    """Raises InputError unless the lists fit together and the layers are a range."""
    num_pages = len(writes.positions)
    for name, pages in (("src", writes.src), ("dst", writes.dst)):
        if pages.indices.shape != (num_pages,):
            raise InputError(
                "positions" if len(pages.indices) > num_pages else f"{name}.indices",
                f"{num_pages} positions go with {num_pages} {name}.indices, there are {len(pages.indices)}",
            )
    if not 0 <= writes.layer_begin <= writes.layer_end <= max_layers:
        raise InputError(
            "layer_end",
            f"layers must be a range within 0..{max_layers}, is {writes.layer_begin}..{writes.layer_end}",
        )
    if writes.length < 0:
        raise InputError("length", f"must be at least 0, is {writes.length}")


def checked_positions(writes: PageWrites, num_pages: int) -> None:
    """Raises InputError unless every position has a digest among `num_pages`."""
    if len(writes.positions) and not (writes.positions.min() >= 0 and writes.positions.max() < num_pages):
        raise InputError("positions", f"must be in 0..{num_pages - 1}, the number of pages is {num_pages}")


def extent(pages: Pages, layer_begin: int, layer_end: int, length: int) -> tuple[int, int]:
    """[lowest byte, highest byte + 1) of the messages; (0, 0) when there are none."""
    if layer_begin == layer_end or not len(pages.indices):
        return 0, 0
    layers = sorted((layer_begin * pages.layer_stride, (layer_end - 1) * pages.layer_stride))
    ends = sorted((int(pages.indices.min()) * pages.page_stride, int(pages.indices.max()) * pages.page_stride))
    return pages.offset + layers[0] + ends[0], pages.offset + layers[1] + ends[1] + length


def offsets(pages: Pages, layer: int) -> list[int]:
    """Where each page's message of `layer` begins."""
    begin = pages.offset + layer * pages.layer_stride
    found: list[int] = (pages.indices.astype(np.int64) * pages.page_stride + begin).tolist()
    return found


def plan_runs(transfer: Transfer, writes: PageWrites, step_gate: int | None) -> Iterator[Run]:
    """One run a layer; `step_gate` is the counter at the step's begin, None for writes without a gate."""
    positions: list[int] = writes.positions.tolist()
    for layer in range(writes.layer_begin, writes.layer_end):
        yield Run(
            transfer=transfer,
            gate=0 if step_gate is None else step_gate + layer + 1,
            layer=layer,
            route=writes.route,
            length=writes.length,
            src=offsets(writes.src, layer),
            dst=offsets(writes.dst, layer),
            positions=positions,
        )
