"""The address that a gateway serves at. Loads next to nothing: the command line tries it before it starts anything."""

import errno
import socket

from headrace.errors import InputError


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises InputError naming what cannot be had."""
    if not host:
        raise InputError("host", "must be an address of this machine; 0.0.0.0 for all of them")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        raise InputError("host", f"must be an address of this machine, is {host!r} ({error})") from error
    try:
        # It reuses the address: a port whose last connections are still in TIME_WAIT is free.
        return socket.create_server(address, family=family, backlog=2048)
    except PermissionError as error:
        raise InputError("port", f"must be one that you may listen on, is {port} ({error.strerror})") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise InputError("port", f"{host}:{port} is in use; another one, or 0 for any that is free") from error
        raise InputError("host", f"must be an address of this machine, is {host!r} ({error.strerror})") from error
