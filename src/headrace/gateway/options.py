"""What a gateway process is started with. Plain data, made by the command line."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """`control` is the ZeroMQ endpoint that instances announce themselves at (ipc://..., or tcp://... with
    --insecure). `tokenizer` is the model's directory; `model` the name that requests may use."""

    name: str = "gateway"
    host: str = "127.0.0.1"
    port: int = 8000
    control: str
    tokenizer: Path
    model: str
    max_queued: int = 256  # requests that wait for a lease or for pages; the next one gets 429
    deadline_s: float = 600.0  # of a request, where it names none
    log_level: str = "info"
