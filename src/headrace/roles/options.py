"""What a process that holds a model is started with. Plain data, made by the command line; loads nothing heavy."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headrace.kvcache.layout import KVDtype
from headrace.protocol.control import Role as RoleName

Transfer = Literal["layers", "whole"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceOptions:
    """`gateways` are the ZeroMQ endpoints of all gateways. `fabric_host` is the address that this host's fabric
    endpoint is bound to. `transfer` "whole" sends nothing before a prompt's last chunk is computed."""

    role: RoleName
    name: str
    gateways: tuple[str, ...]
    model_dir: Path
    model: str
    dtype: KVDtype = "bf16"
    page_size: int = 16
    chunk_tokens: int = 256
    max_running: int = 32
    kv_memory_bytes: int = 512 << 20
    max_model_len: int | None = None  # None: what the model was trained for, as far as the pool holds it
    threads: int = 1
    transfer: Transfer = "layers"
    verify_kv: bool = True
    fabric_host: str = "127.0.0.1"
