"""Which pages are carried, from where to where: byte offsets in two memories. Pure; the same for loops and engine."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.errors import InputError

Offsets = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Page i: `page_bytes` bytes at src_offsets[i] of one memory go to dst_offsets[i] of the other, in this order."""

    src_offsets: Offsets  # [num_pages] int64
    dst_offsets: Offsets  # [num_pages] int64
    page_bytes: int

    def __post_init__(self) -> None:
        """Raises InputError where the two lists are no offsets, or not of the same pages."""
        for name in ("src_offsets", "dst_offsets"):
            offsets = getattr(self, name)
            if offsets.dtype != np.int64 or offsets.ndim != 1 or not offsets.flags.c_contiguous:
                raise InputError(
                    name, f"must be contiguous, [num_pages] int64, is {list(offsets.shape)} {offsets.dtype}"
                )
        if len(self.dst_offsets) != len(self.src_offsets):
            raise InputError(
                "dst_offsets", f"must be {len(self.src_offsets)}, as src_offsets, is {len(self.dst_offsets)}"
            )
        if self.page_bytes < 1:
            raise InputError("page_bytes", f"must be at least 1, is {self.page_bytes}")

    @property
    def num_pages(self) -> int:
        return len(self.src_offsets)

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.page_bytes


def scattered(*, page_bytes: int, num_bytes: int, region_bytes: int, seed: int) -> list[Placement]:
    """`num_bytes` of pages in a random order out of regions of `region_bytes`, as often as the regions have fresh ones.

    The order of either side is one permutation of its region, cut into pieces: taking the placements in turn comes back
    to a page only after all others, so that caches smaller than the regions do not flatter.
    """
    if page_bytes < 1:
        raise InputError("page_bytes", f"must be at least 1, is {page_bytes}")
    num_pages, num_places = num_bytes // page_bytes, region_bytes // page_bytes
    if not 1 <= num_pages <= num_places:
        raise InputError(
            "num_bytes", f"must be in [{page_bytes}, {region_bytes}], a page and the region, is {num_bytes}"
        )
    rng = np.random.default_rng(seed)
    src, dst = (rng.permutation(num_places).astype(np.int64) * page_bytes for _ in range(2))
    begins = range(0, num_places - num_pages + 1, num_pages)
    return [
        Placement(src_offsets=src[at : at + num_pages], dst_offsets=dst[at : at + num_pages], page_bytes=page_bytes)
        for at in begins
    ]
