"""`headrace fabric serve`: lends this machine's side of a measurement to `selftest` and `bench` elsewhere."""

import asyncio
import ipaddress
import os
import signal
import sys
from typing import TYPE_CHECKING

from headrace.cli import options as opt
from headrace.cli.fabric.measure_options import ListenHost, ListenPort
from headrace.cli.logs import DEFAULT_LEVEL, configure_logging
from headrace.gateway.listening import bind

if TYPE_CHECKING:
    from headrace.fabric.measure.server import MeasureServer

DEFAULT_HOST = "127.0.0.1"


def serve_command(
    *,
    host: ListenHost = DEFAULT_HOST,
    port: ListenPort = 0,
    log_level: opt.LogLevel = DEFAULT_LEVEL,
) -> int:
    """Be the other side of a measurement, for one client at a time that has the token printed here. Ctrl-C ends it."""
    configure_logging(log_level, "fabric-serve")
    # Function-local: it loads native code, once all is right.
    from headrace.fabric.measure.greeting import new_token
    from headrace.fabric.measure.server import MeasureServer

    with bind(host, port) as listener:
        token = new_token()
        sys.stdout.write(f"headrace fabric selftest {_place(host, listener.getsockname()[1])} --token {token}\n")
        sys.stdout.flush()
        server = MeasureServer(listener, token, cpu=max(os.sched_getaffinity(0)))
        asyncio.run(_until_told(server))
    return 0


async def _until_told(server: "MeasureServer") -> None:
    loop, told = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, told.set)
    serving, ending = asyncio.ensure_future(server.run()), asyncio.ensure_future(told.wait())
    try:
        await asyncio.wait((serving, ending), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (serving, ending):
            task.cancel()
        await asyncio.gather(serving, ending, return_exceptions=True)
    if not told.is_set():
        serving.result()


def _place(host: str, port: int) -> str:
    """As the other side is to name it: everywhere is no place."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return f"{host}:{port}"
    name = "HOST" if address.is_unspecified else f"[{host}]" if address.version == 6 else host
    return f"{name}:{port}"
