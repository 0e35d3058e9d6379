"""The API keys of a deployment file: which tier the requests of each have. Reads the files that hold keys.

Of a key its sha256 is kept, and no more: neither a process's command line nor a log shows one. This decides no more
than the tier; a key that is not named here is served as any other.
"""

import re
from pathlib import Path
from typing import cast

from headrace.deploy.fields import Fields
from headrace.errors import InputError
from headrace.gateway.budgets import TIERS, digest_of
from headrace.protocol.messages import Tier

MOST_CHARACTERS = 512

DIGEST = re.compile(r"[0-9a-f]{64}")


def read_keys(fields: Fields, *, folder: Path) -> dict[str, Tier]:
    """`[keys.NAME]` with `sha256` or `file`, and `tier` -> tiers by digest. Raises InputError."""
    tiers: dict[str, Tier] = {}
    for name, key in fields.tables():
        digest = _digest(key, folder)
        tier = cast("Tier", key.choice("tier", TIERS))
        key.finish()
        if digest in tiers:
            raise InputError(fields.name(name), "must be another key than those before, is one of them")
        tiers[digest] = tier
    return tiers


def _digest(fields: Fields, folder: Path) -> str:
    digest, file = fields.optional_text("sha256"), fields.optional_text("file")
    if (digest is None) == (file is None):
        raise InputError(fields.name("sha256"), "must be there, or file instead: one of the two")
    if file is not None:
        return digest_of(_read(folder / file, fields.name("file")))
    assert digest is not None, "one of the two is there"
    if not DIGEST.fullmatch(digest):
        raise InputError(fields.name("sha256"), f"must be 64 hexadecimal digits in lower case, is {digest[:80]!r}")
    return digest


def _read(file: Path, field: str) -> str:
    """One line. What is in it is not repeated to anybody."""
    try:
        text = file.read_text().strip()
    except OSError as error:
        raise InputError(field, f"must be a file that can be read: {file}: {error.strerror or error}") from error
    except ValueError as error:
        raise InputError(field, f"must hold one key, {file} is no text") from error
    if not 0 < len(text) <= MOST_CHARACTERS or not text.isascii() or not text.isprintable() or " " in text:
        raise InputError(field, f"must hold one key of visible ASCII, at most {MOST_CHARACTERS}; {file} does not")
    return text
