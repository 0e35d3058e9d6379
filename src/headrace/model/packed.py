"""Weights in the form that native kernels read, packed once per host: a memfd that all processes of one user map.

Owns the memory; `packed_format` knows how it is laid out, `holders` who has it, and nobody here what is packed for
which kernels: the key says both. A memfd, not a file: it gets huge pages, and is never stale, since it goes with its
last holder. Synchronous, for start-up; what `region` gave may be read from any thread.

    first    wait_turn .. no holder .. pack into regions .. seal: end_turn, and others may map it
    others   wait_turn .. map a holder's, become a holder, end_turn .. the same regions in the same order .. seal
"""

import hashlib
import logging
import os
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace.errors import Closed, HeadraceError, InputError
from headrace.kvcache.mapping import forbid_writes, map_shared, try_collapse
from headrace.model.holders import Holder, Holders
from headrace.model.packed_format import (
    FIRST_REGION,
    Contents,
    Refused,
    add_seals,
    end_of_table,
    in_huge_pages,
    in_lines,
    read_contents,
    write_contents,
)

ReadRate = Callable[[NDArray[np.uint8]], float]
"""Reads all of an array once, in order -> GB/s."""

T = TypeVar("T")

_NAME = "headrace-weights"

_SPARE_BYTES = 4 << 20
"""Beyond the capacity: the header, and for each of 50,000 regions its rounding and its place in the table."""

_MOST_READ_BYTES = 256 << 20
"""To measure a rate, which takes some 30 ms then."""

_log = logging.getLogger(__name__)


class RegionsDiffer(HeadraceError):
    """The regions that this process asks for are not those that were packed under the same key: an error of ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """Somebody's sealed memory: our descriptor of it, and what its header says."""

    fd: int
    pid: int
    contents: Contents


def load_packed(
    key: str,
    load: Callable[["PackedWeights"], T],
    *,
    capacity_bytes: int,
    directory: Path | None,
    read: ReadRate | None = None,
) -> tuple[T, "PackedWeights"]:
    """What `load` makes of the regions that it asks for and, unless `is_filled`, fills; and their memory, sealed.

    Asked for other regions than were packed before, it warns and loads again, into a memory of its own."""
    try:
        return _loaded(open_packed(key, capacity_bytes=capacity_bytes, directory=directory), load, read)
    except RegionsDiffer as error:
        _log.warning("weights are packed for this process alone: %s (key %s)", error, key)
    return _loaded(open_packed(key, capacity_bytes=capacity_bytes, directory=None), load, read)


def _loaded(
    packed: "PackedWeights", load: Callable[["PackedWeights"], T], read: ReadRate | None
) -> tuple[T, "PackedWeights"]:
    try:
        loaded = load(packed)
        packed.seal(read)
    except BaseException:
        packed.close()
        raise
    return loaded, packed


def open_packed(key: str, *, capacity_bytes: int, directory: Path | None) -> "PackedWeights":
    """A memory for the weights of `key`, which names model, form and code: a holder's where one lives, else a new one.

    `directory`: of this user alone, where processes find each other, one of them packing while the others wait; None:
    not shared. `capacity_bytes` bounds a new one; what is not used of it costs nothing. Where sharing is not possible,
    one line of the log says why. Raises InputError, or OSError when the system has no such memory.
    """
    if capacity_bytes < 1:
        raise InputError("capacity_bytes", f"must be at least 1, is {capacity_bytes}")
    digest = hashlib.sha256(key.encode()).digest()
    length = in_huge_pages(capacity_bytes + _SPARE_BYTES)
    if directory is not None:
        try:
            return _open_shared(digest, length, directory)
        except OSError as error:
            _log.info("weights are not shared with other processes: %s", error)
    return PackedWeights(digest, length)


def _open_shared(digest: bytes, length: int, directory: Path) -> "PackedWeights":
    holders = Holders(directory, digest.hex()[:24])
    holders.wait_turn()
    try:
        living = holders.living()
        found = _try_find(living, digest)
        packed = PackedWeights(digest, length, found=found, holders=holders, num_holders_seen=len(living))
        if found is not None:
            holders.enter(found.fd)
            holders.end_turn()
    except BaseException:
        holders.leave()
        raise
    return packed


def _try_find(living: list[Holder], digest: bytes) -> _Found | None:
    """The first that may be trusted. Raises PermissionError when there was none but one that we may not look at."""
    forbidden = None
    for holder in living:
        try:
            return _found(holder, digest)
        except PermissionError as error:
            forbidden = error
        except (Refused, OSError) as error:
            _log.info("the packed weights of pid %d are not used: %s", holder.pid, error)
            holder.entry.unlink(missing_ok=True)  # closed without a word, or never what it said
    if forbidden is not None:
        raise forbidden
    return None


def _found(holder: Holder, digest: bytes) -> _Found:
    fd = holder.open(_NAME)
    try:
        return _Found(fd=fd, pid=holder.pid, contents=read_contents(fd, digest))
    except BaseException:
        os.close(fd)
        raise


class PackedWeights:
    """Regions of one memory: to be filled, or `is_filled` by another process already."""

    def __init__(
        self,
        digest: bytes,
        length: int,
        *,
        found: _Found | None = None,
        holders: Holders | None = None,
        num_holders_seen: int = 0,
    ) -> None:
        """`open_packed` makes them. Owns what it is given. Raises OSError."""
        self.is_filled = found is not None
        self.shared_with = found.pid if found else None
        self.num_holders_seen = num_holders_seen
        self.num_bytes = 0
        self.huge_pages = False
        self.read_gbps: float | None = None
        self.read_gbps_before: float | None = None
        """Before huge pages; None where it had them when it came."""
        self._digest = digest
        self._found = found
        self._holders = holders
        self._sizes: list[int] = []
        self._end = FIRST_REGION
        self._is_sealed = False
        self._fd = found.fd if found else os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._close_fd = weakref.finalize(self, os.close, self._fd)
        self._bytes: NDArray[np.uint8] | None = None
        try:
            if found is None:
                os.ftruncate(self._fd, length)
            self._bytes = map_shared(self._fd, os.fstat(self._fd).st_size, writable=found is None)
        except BaseException:
            self._close_fd()
            raise

    def region(self, num_bytes: int) -> NDArray[np.uint8]:
        """The next region, `[num_bytes] uint8`, 64-byte aligned: zeros, or read-only when `is_filled`.

        Raises RegionsDiffer when it is not the next that was packed, Closed."""
        assert num_bytes > 0 and not self._is_sealed, f"{num_bytes} bytes of {self}"
        memory, begin, index = self._memory, self._end, len(self._sizes)
        if self._found is not None and self._found.contents.sizes[index : index + 1] != (num_bytes,):
            raise RegionsDiffer(f"region {index} is asked for with {num_bytes} bytes, as which it was not packed")
        self._sizes.append(num_bytes)
        self._end += in_lines(num_bytes)
        self.num_bytes += num_bytes
        assert end_of_table(self._end, len(self._sizes)) <= len(memory), f"behind the capacity: {self}"
        return memory[begin : begin + num_bytes]

    def seal(self, read: ReadRate | None = None) -> None:
        """After the last region: into huge pages; from here on others may map it, and a write to it faults.

        `read` measures, before and after; `read_rate_gbps` where there is none. Raises RegionsDiffer when fewer
        regions were asked for than are there, Closed."""
        assert not self._is_sealed, f"{self} again"
        memory, read = self._memory, read or read_rate_gbps
        if self._found is not None and len(self._sizes) != len(self._found.contents.sizes):
            num_packed = len(self._found.contents.sizes)
            raise RegionsDiffer(f"{len(self._sizes)} regions are asked for, {num_packed} were packed")
        whole = memory if self._found else self._give_back_the_rest(memory)
        part = whole[:_MOST_READ_BYTES]
        if not (self._found and self._found.contents.in_huge_pages):
            np.add.reduce(part[::4096])  # mapped first, or that would be measured
            self.read_gbps_before = read(part)
        self.huge_pages = try_collapse(whole, "packed weights")
        if self._found is None:
            contents = Contents(sizes=tuple(self._sizes), in_huge_pages=self.huge_pages)
            write_contents(whole, self._digest, contents)
            forbid_writes(whole)
            self._publish()
        self._is_sealed = True
        self.read_gbps = read(part)

    def _give_back_the_rest(self, memory: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Of the capacity -> all that is used."""
        length = in_huge_pages(end_of_table(self._end, len(self._sizes)))
        os.ftruncate(self._fd, length)
        return memory[:length]

    def _publish(self) -> None:
        if self._holders is None:
            return
        try:
            add_seals(self._fd)
            self._holders.enter(self._fd)
        except OSError as error:
            _log.info("weights are not shared with other processes: %s", error)
        finally:
            self._holders.end_turn()

    def told(self, seconds: float) -> str:
        """What it came to, in one line for the log; `seconds` that packing took."""
        origin = f"shared with pid {self.shared_with}" if self.is_filled else f"packed in {seconds:.1f} s"
        words = f"{self.num_bytes / 1e6:.0f} MB {origin}, read at {self.read_gbps or 0:.1f} GB/s"
        if not self.huge_pages:
            return f"{words} without huge pages"
        if self.read_gbps_before is None:
            return words
        return f"{words} ({self.read_gbps_before:.1f} before huge pages)"

    @property
    def _memory(self) -> NDArray[np.uint8]:
        if self._bytes is None:
            raise Closed("the packed weights were closed")
        return self._bytes

    def close(self) -> None:
        """Be a holder no more, and let go of the mapping, which goes with the last array over it. Idempotent."""
        self._bytes = None
        if self._holders is not None:
            self._holders.leave()
        self._close_fd()

    def __repr__(self) -> str:
        state = "closed" if self._bytes is None else "sealed" if self._is_sealed else "open"
        origin = f"of pid {self.shared_with}" if self.is_filled else "packed here"
        counts = f"regions={len(self._sizes)}, bytes={self.num_bytes}, holders_seen={self.num_holders_seen}"
        return f"PackedWeights({counts}, huge_pages={self.huge_pages}, {origin}, {state})"


def read_rate_gbps(array: NDArray[np.uint8]) -> float:
    """Of one core that reads all of it once, in order, by numpy."""
    words = array[: len(array) // 8 * 8].view(np.uint64)
    begin = time.perf_counter()
    np.add.reduce(words)
    return array.nbytes / (time.perf_counter() - begin) / 1e9
