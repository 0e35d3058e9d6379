"""`Ranks` over gloo: processes of one host that exchange tensors over its loopback interface.

Owns one process group, and leaves torch's default one alone. Each rank has a connection to each other, so a rank that
dies is noticed by whoever waits for it; one that hangs, after the time-out. Called on the model thread; the GIL is free
while it waits.

Sums are taken here, not by gloo: its own go through the ranks in an order that depends on where in the tensor an
element stands, so that a row's bits would depend on what is computed beside it (decision 0009).
"""

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

_LOOPBACK = "127.0.0.1"


class GlooRanks:
    """`rank` of `size` that all name the same `meeting_point`: a file that is not there yet, where only they can
    write. Waits until all have come. Raises RuntimeError when they have not after `timeout_s`."""

    def __init__(self, meeting_point: Path, *, rank: int, size: int, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        gloo: Any = distributed.ProcessGroupGloo  # torch's stubs leave out most of it
        options = gloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [gloo.create_device(hostname=_LOOPBACK)]
        options._threads = 1  # one call at a time
        store = distributed.FileStore(str(meeting_point), size)  # type: ignore[attr-defined]
        store.set_timeout(options._timeout)
        self._group: Any = gloo(store, rank, size, options)

    def all_reduce(self, x: torch.Tensor) -> None:
        first, *others = self.all_gather(x)
        x.copy_(first)
        for other in others:
            x += other

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        gathered = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        self._group.allgather([gathered], [x.contiguous()]).wait()
        return gathered

    def all_to_all(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        sent = torch.tensor([len(part) for part in parts])
        received = torch.empty_like(sent)
        self._group.alltoall_base(received, sent, [], []).wait()
        dtype, row = parts[0].dtype, parts[0].shape[1:]
        row_bytes = row.numel() * dtype.itemsize
        out = torch.empty(int(received.sum()) * row_bytes, dtype=torch.uint8)  # gloo moves few dtypes, but all bytes
        into, of = ([number * row_bytes for number in numbers.tolist()] for numbers in (received, sent))
        self._group.alltoall_base(out, torch.cat(list(parts)).flatten().view(torch.uint8), into, of).wait()
        return list(out.view(dtype).view(-1, *row).split_with_sizes(received.tolist()))

    def close(self) -> None:
        """Leave: whoever waits for this rank gets a RuntimeError. Idempotent."""
        self._group = None  # its end closes its connections; its `abort` would end the process

    def __repr__(self) -> str:
        return f"GlooRanks({self.rank} of {self.size})"
