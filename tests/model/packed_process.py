"""A process of its own that wants packed weights: `python packed_process.py DIRECTORY FATE`, and the regions of all.

FATE is `plain`, `hold` (it waits for a line from outside before it seals), `die` (it kills itself half way) or `leave`
(it ends without closing). It says what it has as a line of JSON, once on opening and once when sealed; then it does
what it is told: `check` its bytes, or `write` where it must not. It ends with its stdin.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.model.packed import PackedWeights, open_packed

KEY = "a model, a form"
SIZES = (1000, 3 << 20, 64, 700_001)
CAPACITY = 64 << 20


def content(index: int, num_bytes: int) -> NDArray[np.uint8]:
    return np.random.default_rng(index).integers(0, 256, num_bytes, np.uint8)


def is_whole(regions: Iterable[NDArray[np.uint8]]) -> bool:
    return all(np.array_equal(region, content(index, len(region))) for index, region in enumerate(regions))


def fill(packed: PackedWeights, sizes: Iterable[int] = SIZES) -> list[NDArray[np.uint8]]:
    """What every process of the key does."""
    regions = []
    for index, num_bytes in enumerate(sizes):
        region = packed.region(num_bytes)
        if region.flags.writeable:
            region[:] = content(index, num_bytes)
        regions.append(region)
    return regions


class PackingProcess:
    """The process, from the test's side."""

    def __init__(self, directory: Path, fate: str = "plain") -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(directory), fate],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self.process.pid

    def __enter__(self) -> "PackingProcess":
        return self

    def __exit__(self, *_: object) -> None:
        with self.process:  # closes its pipes and waits
            self.process.kill()

    def hears(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def sealed(self) -> Any:
        """What it says when it has come that far."""
        self.hears()
        return self.hears()

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def end(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait()


def tell(**said: object) -> None:
    print(json.dumps(said), flush=True)


def main(directory: str, fate: str) -> None:
    packed = open_packed(KEY, capacity_bytes=CAPACITY, directory=Path(directory))
    tell(is_filled=packed.is_filled, shared_with=packed.shared_with)
    if fate == "die":
        fill(packed, SIZES[:2])
        os.kill(os.getpid(), signal.SIGKILL)
    regions = fill(packed)
    if fate == "hold":
        sys.stdin.readline()
    packed.seal()
    tell(inode=os.fstat(packed._fd).st_ino, is_filled=packed.is_filled, seen=packed.num_holders_seen)
    if fate == "leave":
        return
    for line in sys.stdin:
        if line == "write\n":
            regions[1][5] = 1
        tell(is_whole=is_whole(regions))
    packed.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
