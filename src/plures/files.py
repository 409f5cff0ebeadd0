"""Atomic writes, and checksums that detect damaged files."""

import contextlib
import errno
import hashlib
import json
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from plures.errors import PluresError


@contextmanager
def told(action: str, path: object, advice: str = "") -> Iterator[None]:
    """Turn an error of the file system into one sentence: what cannot be done with a path, why, and what to do."""
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or error
        raise PluresError(f"cannot {action} {path}: {reason}{advice}") from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write a file beside the one that it replaces; it takes that place when it is complete and on the disk.

    A crash leaves the old file or the new one. A file system's error becomes one sentence, and the old file stays.
    Missing folders are made.
    """
    # Short whatever the name is, and of this call alone: threads and processes may write the same file.
    beside = path.with_name(f".{path.name[:40]}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        with told("write", path, "; an existing file is unchanged"):
            path.parent.mkdir(parents=True, exist_ok=True)
            beside.touch()
            usual = beside.stat().st_mode
            yield beside
            beside.chmod(usual)  # as readable as the user's other files
            with beside.open("r+b") as written:  # Windows flushes no file that was opened to read
                os.fsync(written.fileno())
            beside.replace(path)
    finally:
        with contextlib.suppress(OSError, ValueError):
            beside.unlink(missing_ok=True)


def is_file(path: Path) -> bool:
    """Return whether there is a file; a name or a folder that the system refuses becomes one sentence."""
    with told("read", path):
        return path.is_file()


def check_place(path: Path, advice: str = "") -> None:
    """Refuse a place where no file can be written, before minutes of work are lost; missing folders are made."""
    with told("write", path, advice):
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISDIR(path.stat().st_mode):
                raise IsADirectoryError(errno.EISDIR, "it is a folder")


def write(path: Path, contents: bytes) -> None:
    """Write a file completely or not at all."""
    with replacing(path) as beside:
        beside.write_bytes(contents)


def write_json(path: Path, values: Any) -> None:
    """Write values as JSON, completely or not at all; NaN, which JSON does not have, is refused."""
    write(path, json.dumps(values, indent=1, allow_nan=False).encode() + b"\n")


def digest(*parts: Any, length: int = 16) -> str:
    """Return a checksum of bytes, as a number of hexadecimal digits."""
    total = hashlib.sha256()
    for part in parts:
        total.update(part)
    return total.hexdigest()[:length]


def sealed(text: str) -> str:
    """Return a text with its checksum before it, so that `unsealed` can tell whether it has changed."""
    return f"{digest(text.encode())} {text}"


def unsealed(text: str) -> str | None:
    """Return the text without its checksum; None if it is not the text that was sealed."""
    checksum, _, plain = text.partition(" ")
    return plain if checksum == digest(plain.encode()) else None
