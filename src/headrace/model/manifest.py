"""What a finished directory holds: size and sha256 of each file, written last, checked at each start.

Owns the rule by which a directory counts as whole. Knows nothing of models. Whoever writes a directory does so under
another name, calls `seal`, and moves it to its place in one step; so a directory without a manifest that agrees with
it was changed afterwards, or never finished.
"""

import hashlib
import os
from pathlib import Path

import msgspec

MANIFEST = "headrace-manifest.json"
SMALL_BYTES = 16 << 20
"""Files up to this size are hashed at every check: a few milliseconds."""


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    num_bytes: int
    sha256: str
    mtime_ns: int


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`origin` names what the files were made from, and by which version of what."""

    origin: str
    files: dict[str, FileRecord]


def seal(directory: Path, origin: str) -> None:
    """Writes the manifest of the files that are there, and has everything on the disk before it returns."""
    files = {}
    for path in sorted(directory.iterdir()):
        sync(path)
        status = path.stat()
        files[path.name] = FileRecord(num_bytes=status.st_size, sha256=sha256_of(path), mtime_ns=status.st_mtime_ns)
    manifest = directory / MANIFEST
    manifest.write_bytes(msgspec.json.format(msgspec.json.encode(Manifest(origin=origin, files=files))) + b"\n")
    sync(manifest)
    sync(directory)


def is_whole(directory: Path, origin: str) -> bool:
    """Whether the directory is what `seal` saw.

    A large file is hashed only when its time of change is another one: hashing 270 MB would cost each start up to a
    second. What changed behind the file system's back (a bad disk) is therefore found in small files only."""
    try:
        manifest = msgspec.json.decode((directory / MANIFEST).read_bytes(), type=Manifest)
        return manifest.origin == origin and all(
            is_same(directory / name, record) for name, record in manifest.files.items()
        )
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, msgspec.DecodeError):
        return False


def is_same(path: Path, record: FileRecord) -> bool:
    status = path.stat()
    if status.st_size != record.num_bytes:
        return False
    if status.st_mtime_ns == record.mtime_ns and status.st_size > SMALL_BYTES:
        return True
    return sha256_of(path) == record.sha256


def sync(path: Path) -> None:
    """Has the file's bytes, or the directory's names, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
