"""Who comes after an instance that was drained: nobody, or the same one in its other role, in a process of its own.

A process of its own, for peers take an exit for the proof that nobody has their memory mapped any more. Where a
supervisor looks after the instance, it is left word in a file that it named in the environment; else the instance
starts its successor itself, and ends.
"""

import json
import logging
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.child import HEADRACE
from headrace.roles.options import NEAR, InstanceOptions

if TYPE_CHECKING:
    from headrace.protocol.control import Successor
    from headrace.roles.draining import Drained

SUCCESSOR_FILE = "HEADRACE_SUCCESSOR_FILE"
"""The environment variable."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """What a drained process has left. `command` None: nobody comes."""

    name: str
    command: tuple[str, ...] | None


def succeed(drained: "Drained | None", options: InstanceOptions, *, insecure: bool, log_level: str) -> None:
    """The last act of an instance that ran with these options. None: it was told to end, not drained."""
    if drained is None:
        return
    command, name = None, options.name
    if drained.successor is not None:
        after = succeeding(options, drained.successor)
        command, name = (*HEADRACE, *arguments_of(after, insecure=insecure, log_level=log_level)), after.name
    file = os.environ.get(SUCCESSOR_FILE)
    if file is not None:
        Path(file).write_text(json.dumps({"name": name, "command": command}))
    elif command is not None:
        process = subprocess.Popen(command)
        process.returncode = 0  # not ours to wait for: it outlives us
        _log.info("%s goes on as %s, process %d", options.name, name, process.pid)


def read_word(file: Path) -> Word | None:
    """None where none was left."""
    try:
        word = json.loads(file.read_text())
    except FileNotFoundError:
        return None
    command = word["command"]
    return Word(name=word["name"], command=None if command is None else tuple(command))


def succeeding(options: InstanceOptions, successor: "Successor") -> InstanceOptions:
    """The same in its other role: its sizes and places stay, its bounds are those that were said."""
    return replace(
        options,
        role=successor.role,
        name=successor.name,
        tpot_s=successor.tpot_s,
        max_stall_s=successor.max_stall_s,
    )


def arguments_of(options: InstanceOptions, *, insecure: bool, log_level: str) -> tuple[str, ...]:
    """The command line that makes these options of a prefiller or a decoder."""
    return tuple(_words(options, insecure=insecure, log_level=log_level))


def _words(options: InstanceOptions, *, insecure: bool, log_level: str) -> Iterator[str]:
    yield from (options.role, "--name", options.name, "--log-level", log_level)
    yield from ("--model", str(options.model_dir), "--served-name", options.model)
    yield from ("--dtype", options.dtype, "--kernels", options.kernels, "--tp", str(options.tp))
    yield from ("--page-size", str(options.page_size), "--chunk-tokens", str(options.chunk_tokens))
    yield from ("--max-running", str(options.max_running), "--kv-memory", str(options.kv_memory_bytes))
    yield from ("--threads", str(options.threads), "--transports", ",".join(options.transports))
    for endpoint in options.gateways:
        yield from ("--gateway", endpoint)
    if not set(options.transports) <= set(NEAR):
        for host in options.fabric_hosts:
            yield from ("--fabric-host", host)
    if options.cpus:
        yield from ("--cpus", ",".join(map(str, options.cpus)))
    if options.max_model_len is not None:
        yield from ("--max-model-len", str(options.max_model_len))
    if insecure:
        yield "--insecure"
    yield from _words_of_prefiller(options) if options.role == "prefiller" else _words_of_decoder(options)


def _words_of_prefiller(options: InstanceOptions) -> Iterator[str]:
    yield from ("--transfer", options.transfer)


def _words_of_decoder(options: InstanceOptions) -> Iterator[str]:
    yield "--verify-kv" if options.verify_kv else "--no-verify-kv"
    for name, bound_s in (("--tpot-ms", options.tpot_s), ("--max-stall-ms", options.max_stall_s)):
        if bound_s is not None:
            yield from (name, repr(bound_s * 1e3))
