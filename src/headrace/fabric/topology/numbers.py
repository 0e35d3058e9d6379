"""Numbers as sysfs writes them. Pure."""

import re

_NUMBER = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)(?: .*)?")
_HEXADECIMAL = re.compile(r"0x[0-9a-f]{1,8}")


def first_number(text: str | None) -> float | None:
    """Of `32.0 GT/s PCIe`, `400 Gb/sec (4X NDR)`, `16`. None for `Unknown` and for -1, which mean that."""
    match = _NUMBER.fullmatch(text or "")
    return float(match[1]) if match else None


def hexadecimal(text: str | None) -> int | None:
    return int(text, 16) if text and _HEXADECIMAL.fullmatch(text) else None
