"""A port to be fixed in a test, for a fabric that listens there and on the next one."""

import random
import socket
from contextlib import ExitStack


def fixed_port() -> int:
    """Free now, the next one too, and outside of what the kernel hands out to whoever connects."""
    while True:
        port = random.randrange(20_000, 30_000)
        try:
            with ExitStack() as probes:
                for each in (port, port + 1):
                    probes.enter_context(socket.socket()).bind(("127.0.0.1", each))
        except OSError:
            continue
        return port
