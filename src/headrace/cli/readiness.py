"""Waiting until a gateway can serve and all its instances are there: GET /health and /metrics, again and again.

Knows HTTP/1.1 as far as that takes.
"""

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Mapping

ASK_EVERY_S = 0.1
ANSWER_WITHIN_S = 5.0
TELL_EVERY_S = 15.0

ALIVE = re.compile(r'^headrace_instances_alive\{role="(\w+)"\} ([0-9.]+)$', re.MULTILINE)

_log = logging.getLogger(__name__)


async def wait_until_ready(host: str, port: int, instances: Mapping[str, int]) -> None:
    """`instances`: how many of each role. Says every quarter of a minute what is missing. Never gives up."""
    tell_at = time.monotonic() + TELL_EVERY_S
    while missing := await what_is_missing(host, port, instances):
        if time.monotonic() >= tell_at:
            _log.info("not ready yet: %s", missing)
            tell_at = time.monotonic() + TELL_EVERY_S
        await asyncio.sleep(ASK_EVERY_S)


async def what_is_missing(host: str, port: int, instances: Mapping[str, int]) -> str | None:
    for path in ("/health", "/metrics"):
        status, body = await get(host, port, path)
        if status != 200:
            return body or f"{path} is answered with status {status}"
    alive = {role: float(number) for role, number in ALIVE.findall(body)}
    missing = [
        f"{alive.get(role, 0):.0f} of {number} of role {role}"
        for role, number in instances.items()
        if alive.get(role, 0) < number
    ]
    return ", ".join(missing) or None


async def get(host: str, port: int, path: str) -> tuple[int, str]:
    """-> status and body; 0 and why where there is no answer."""
    try:
        async with asyncio.timeout(ANSWER_WITHIN_S):
            answer = await _exchange(host, port, f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n")
    except (OSError, TimeoutError) as error:
        return 0, f"no answer at {host}:{port} ({error})"
    head, _, body = answer.partition("\r\n\r\n")
    code = head.split(" ", 2)[1:2]
    return (int(code[0]) if code and code[0].isdecimal() else 0), body


async def _exchange(host: str, port: int, request: str) -> str:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(request.encode())
        return (await reader.read()).decode(errors="replace")
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
