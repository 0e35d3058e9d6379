"""What command line and files read alike: sizes of memory (`512MiB`, `1.5 GB`, or bytes), bounds of numbers. Pure."""

import re
from fractions import Fraction

UNITS = {
    **{unit: 1000**power for power, unit in enumerate(("B", "KB", "MB", "GB", "TB"))},
    **{unit: 1024**power for power, unit in enumerate(("KiB", "MiB", "GiB", "TiB"), start=1)},
}
_UNIT_OF = {unit.lower(): factor for unit, factor in UNITS.items()}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([a-z]*)")

MOST_TOKENS = 2**20
MOST_REQUESTS = 2**16
MOST_INSTANCES = 256
MOST_RANKS = 64
MOST_MS = 600_000

WANTED = "a size such as 512MiB, 2GB or 1073741824"


def parsed_size(text: str) -> int | None:
    """In bytes, at least 1; None where it is no size."""
    match = _SIZE.fullmatch(text.strip().lower())
    factor = _UNIT_OF.get(match[2] or "b") if match else None
    num_bytes = int(Fraction(match[1]) * factor) if match and factor else 0
    return num_bytes or None
