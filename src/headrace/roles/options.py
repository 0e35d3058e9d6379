"""What a process that holds a model is started with. Plain data, made by the command line; loads nothing heavy."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headrace.errors import InputError
from headrace.kvcache.layout import KVDtype
from headrace.model.options import KernelChoice
from headrace.protocol.control import Role as RoleName

Transfer = Literal["layers", "whole"]
Transport = Literal["mapped", "shm", "efa", "verbs", "tcp"]
NEAR: tuple[Transport, ...] = ("mapped", "shm")
MAX_FABRIC_HOSTS = 4
"""All as the fabric has them, whose modules load numpy and more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceOptions:
    """`gateways` are the ZeroMQ endpoints of all gateways. `fabric_hosts` are the addresses that this process's fabric
    listens at, one for each NIC; a peer is reached by the first of `transports` that it has as well. `transfer` "whole"
    sends nothing before a prompt's last chunk is computed. `tpot_s` and `max_stall_s` are for those that decode
    (`EngineOptions` says what they bound); None: no such bound.

    An instance is `dp` groups of `tp` ranks (`kvcache.sharding`), each rank a process. `kv_memory_bytes` are shared by
    all of them, `threads` are each rank's, `cpus` those of rank after rank; `chunk_tokens` and `max_running` are each
    group's."""

    role: RoleName
    name: str
    gateways: tuple[str, ...]
    model_dir: Path
    model: str
    dtype: KVDtype = "bf16"
    tp: int = 1
    dp: int = 1
    page_size: int = 16
    chunk_tokens: int = 256
    max_running: int = 32
    tpot_s: float | None = None
    max_stall_s: float | None = None
    kv_memory_bytes: int = 512 << 20
    max_model_len: int | None = None  # None: what the model was trained for, as far as the pool holds it
    kernels: KernelChoice = "auto"
    threads: int = 1
    cpus: tuple[int, ...] = ()  # of the threads, in order; none: wherever the system puts them
    share_weights_in: Path | None = None  # where this user's processes find each other's; None: not shared
    transfer: Transfer = "layers"
    verify_kv: bool = True
    transports: tuple[Transport, ...] = ("mapped", "tcp")
    fabric_hosts: tuple[str, ...] = ("127.0.0.1",)

    def __post_init__(self) -> None:
        if self.role == "prefiller" and self.dp != 1:
            raise InputError("dp", f"must be 1 for a prefiller, whose tickets all lie in one pool, is {self.dp}")

    @property
    def num_ranks(self) -> int:
        return self.tp * self.dp

    def cpus_of(self, rank: int) -> tuple[int, ...]:
        return self.cpus[rank * self.threads : (rank + 1) * self.threads]
