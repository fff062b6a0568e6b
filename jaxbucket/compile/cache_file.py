"""Files that are whole or refused: a checksum, a header in JSON, and a body.

A folder of them has a bound; what was not used for longest goes first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import stat
import time
import uuid
from typing import Any

_MAGIC = b"jaxbucket 1 "
_DIGITS = 64
_SECONDS_OF_A_DEAD_WRITER = 3600
PARTIAL = ".partial"


class BadFileError(ValueError):
    """A file that is cut, damaged or somebody else's."""


@dataclasses.dataclass(frozen=True)
class Kept:
    """What was in a file."""

    header: dict[str, Any]
    body: bytes


def read(path: pathlib.Path) -> Kept | None:
    """Returns what is in a file, None if there is none.

    Raises:
      BadFileError: if it cannot be read, or is not what was written.
    """
    try:
        # A pipe would be waited for.
        if not stat.S_ISREG(path.stat().st_mode):
            raise BadFileError("is not a file")
        with path.open("rb") as file:
            # What is somebody else's may be of any size.
            magic = file.read(len(_MAGIC))
            content = file.read() if magic == _MAGIC else b""
    except FileNotFoundError:
        return None
    except (OSError, MemoryError) as error:
        raise BadFileError(f"cannot be read: {error}") from None
    if magic != _MAGIC:
        cut = _MAGIC.startswith(magic)
        raise BadFileError("is cut" if cut else "is not one of jaxbucket's")
    digest, rest = content[:_DIGITS], content[_DIGITS:]
    if hashlib.sha256(rest).hexdigest().encode() != digest:
        raise BadFileError("is cut or damaged")
    header, _, body = rest.partition(b"\n")
    return Kept(_header(header), body)


def _header(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    # Lists within lists, too deep to be read.
    except (ValueError, RecursionError) as error:
        raise BadFileError(f"has a header that is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise BadFileError(f"has a header that is a {type(header).__name__}")
    return header


def touch(path: pathlib.Path) -> None:
    """Notes that a file is used: the last use decides which one goes."""
    with contextlib.suppress(OSError):
        os.utime(path)


def write(path: pathlib.Path, kept: Kept) -> None:
    """Writes a file, whole all at once, whoever else writes the same.

    Raises:
      OSError: if it cannot be written; nothing of it is left then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    rest = json.dumps(kept.header).encode() + b"\n" + kept.body
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}{PARTIAL}")
    try:
        with partial.open("xb") as file:
            file.write(_MAGIC + hashlib.sha256(rest).hexdigest().encode() + rest)
            file.flush()
            # A name without its bytes would outlive a machine that goes down.
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def clean_up(
    folder: pathlib.Path, suffixes: tuple[str, ...], most_bytes: int, used: set[str]
) -> int:
    """Removes what was not used for longest, until the rest fits.

    Args:
      folder: where; other files in it stay.
      suffixes: of the files that are ours.
      most_bytes: that all of them may have.
      used: names of those that stay.

    Returns:
      How many bytes they have.
    """
    found, total = [], 0
    for path in folder.iterdir():
        # Removed by another process, or not for us to read.
        with contextlib.suppress(OSError):
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode):
                continue
            if path.name.endswith(PARTIAL):
                if time.time() - status.st_mtime > _SECONDS_OF_A_DEAD_WRITER:
                    path.unlink()
            elif path.suffix in suffixes:
                found.append((status.st_mtime, status.st_size, path))
                total += status.st_size
    for _, size, path in sorted(found):
        if total <= most_bytes:
            break
        if path.name not in used:
            path.unlink(missing_ok=True)
            total -= size
    return total
