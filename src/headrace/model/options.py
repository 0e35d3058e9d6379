"""How a model is computed in one process. Plain data; loads nothing heavy."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

KernelChoice = Literal["auto", "native", "torch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeOptions:
    """`kernels` "auto": native ones where the CPU, the dtype and the model have them, else torch. `cpus`: where the
    threads run, in order, the first being the model thread's; none: wherever the system puts them. `share_in`: the
    folder where this user's processes find each other's packed weights; None: these are this process's own."""

    kernels: KernelChoice = "auto"
    threads: int = 1
    cpus: tuple[int, ...] = ()
    share_in: Path | None = None
