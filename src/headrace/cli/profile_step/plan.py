"""What a profile runs: its options, and the instance, gateway and streams that follow from them.

Pure but for the model's configuration, which is read; whatever is wrong is found here, before anything is loaded.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from typer import BadParameter

from headrace.cli.fetching import require_pool
from headrace.cli.profile_step.client import Asked
from headrace.cli.run_directory import CONTROL_SOCKET
from headrace.errors import InputError
from headrace.kvcache.layout import KVDtype, num_pages_for
from headrace.model.checkpoint import read_shape
from headrace.model.options import KernelChoice
from headrace.model.shape import ModelShape
from headrace.roles.options import InstanceOptions

HOST = "127.0.0.1"
MODEL = "profiled"
MOST_STREAMS = 256

WARM_STEPS = 8
"""With all streams, before those that count."""
_ARRIVAL_STEPS = 64
"""That the first stream may be ahead of the last one: they come one after the other, through the gateway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """`kv_len` keys are read by each row at first. `cpus` as in InstanceOptions."""

    model: str
    dtype: KVDtype
    kernels: KernelChoice
    threads: int
    cpus: tuple[int, ...]
    streams: tuple[int, ...]
    kv_len: int
    num_steps: int
    temperature: float
    json_file: Path | None
    log_level: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilePlan:
    options: ProfileOptions
    instance: InstanceOptions
    shape: ModelShape
    directory: Path  # of the sockets and of what the processes leave
    port: int

    def key_bytes(self, kv_len: int) -> int:
        """Keys and values that a row with so many reads, in all layers."""
        kv, local = self.shape.kv_layout(self.instance.page_size, self.options.dtype), self.shape.local_attention
        num_local = 0 if local is None else len(local.layers)
        num_keys = (kv.num_layers - num_local) * kv_len
        if local is not None:
            num_keys += num_local * min(kv_len, local.window)
        return num_keys * kv.page_bytes // kv.page_size

    def gateway_command(self) -> tuple[str, ...]:
        return (
            *(sys.executable, "-P", "-m", "headrace", "gateway", "--name", "gateway"),
            *("--control", self.instance.gateways[0], "--host", HOST, "--port", str(self.port)),
            *("--model", str(self.instance.model_dir), "--served-name", MODEL, "--log-level", self.options.log_level),
        )

    def client_command(self, asked_file: Path) -> tuple[str, ...]:
        return (sys.executable, "-P", "-m", "headrace.cli.profile_step.client", str(asked_file))

    def asked(self, num_streams: int) -> Asked:
        return Asked(
            host=HOST,
            port=self.port,
            model=MODEL,
            num_streams=num_streams,
            prompt_tokens=self.options.kv_len,
            max_tokens=_max_tokens(self.options, self.instance.chunk_tokens),
            temperature=self.options.temperature,
            vocab_size=self.shape.vocab_size,
            seed=1,
        )


@dataclass(frozen=True, slots=True)
class StreamCounts:
    """Not a plain tuple, which typer would take for an option of several words."""

    numbers: tuple[int, ...]

    def __str__(self) -> str:
        return ",".join(map(str, self.numbers))


def stream_counts(value: object) -> StreamCounts:
    """`1,8`: one profile for each, none twice."""
    if isinstance(value, StreamCounts):
        return value
    numbers = [int(word) if word.isdecimal() and len(word) < 4 else 0 for word in str(value).split(",")]
    if not all(1 <= number <= MOST_STREAMS for number in numbers):
        raise BadParameter(f"must be numbers of streams such as 1,8, each from 1 to {MOST_STREAMS}, is {str(value)!r}")
    if len(set(numbers)) < len(numbers):
        raise BadParameter(f"must name each number of streams once, is {str(value)!r}")
    return StreamCounts(tuple(numbers))


def plan_profile(options: ProfileOptions, *, model_dir: Path, directory: Path, port: int) -> ProfilePlan:
    """Raises InputError for what the model does not hold, and for a file that cannot be written."""
    if options.json_file is not None and not options.json_file.parent.is_dir():
        raise InputError("json_file", f"must be in a folder that exists, is {options.json_file}")
    shape = read_shape(model_dir)
    instance = _instance(options, shape, model_dir=model_dir, control=f"ipc://{directory / CONTROL_SOCKET}")
    assert instance.max_model_len is not None
    if instance.max_model_len > shape.max_model_len:
        generated = instance.max_model_len - options.kv_len
        said = f"must leave room for the {generated} tokens of each stream in the model's {shape.max_model_len}"
        raise InputError("kv_len", f"{said}, is {options.kv_len}")
    require_pool(instance)
    return ProfilePlan(options=options, instance=instance, shape=shape, directory=directory, port=port)


def _instance(options: ProfileOptions, shape: ModelShape, *, model_dir: Path, control: str) -> InstanceOptions:
    sizes = InstanceOptions(role="colocated", name="profiled", gateways=(control,), model_dir=model_dir, model=MODEL)
    longest = options.kv_len + _max_tokens(options, sizes.chunk_tokens)
    kv = shape.kv_layout(sizes.page_size, options.dtype)
    num_pages = max(options.streams) * (num_pages_for(longest, sizes.page_size) + 1)
    return InstanceOptions(
        role=sizes.role,
        name=sizes.name,
        gateways=sizes.gateways,
        model_dir=sizes.model_dir,
        model=sizes.model,
        dtype=options.dtype,
        max_running=max(options.streams),
        max_model_len=longest,
        kv_memory_bytes=num_pages * kv.num_layers * kv.page_bytes,
        kernels=options.kernels,
        threads=options.threads,
        cpus=options.cpus,
    )


def _max_tokens(options: ProfileOptions, chunk_tokens: int) -> int:
    """Of a stream: the first one to come decodes while the prompts of the others are computed."""
    num_chunks = -(-max(options.streams) * options.kv_len // chunk_tokens)
    return options.num_steps + WARM_STEPS + num_chunks + _ARRIVAL_STEPS
