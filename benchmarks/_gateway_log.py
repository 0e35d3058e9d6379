"""What a gateway's log says of each request at --log-level debug, by the id that the client has of it."""

import re


def decoders(log: str) -> dict[str, str]:
    """Where it ended."""
    return dict(re.findall(r"\b(cmpl-\w+)-0: \w+; .*; decoder (\S+), prefiller", log))


def moved(log: str) -> set[str]:
    """Those that lost a decoder, and went on at another."""
    return set(re.findall(r"\b(cmpl-\w+)-0: .*; it goes on elsewhere", log))
