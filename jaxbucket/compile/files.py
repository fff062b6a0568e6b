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
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadFileError(f"cannot be read: {error}") from None
    if not content.startswith(_MAGIC):
        cut = len(content) < len(_MAGIC) and _MAGIC.startswith(content)
        raise BadFileError("is cut" if cut else "is not one of jaxbucket's")
    digest, rest = content[len(_MAGIC) :][:_DIGITS], content[len(_MAGIC) + _DIGITS :]
    if hashlib.sha256(rest).hexdigest().encode() != digest:
        raise BadFileError("is cut or damaged")
    header, _, body = rest.partition(b"\n")
    return Kept(json.loads(header), body)


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
        with contextlib.suppress(FileNotFoundError):
            stat = path.stat()
            if path.name.endswith(PARTIAL):
                if time.time() - stat.st_mtime > _SECONDS_OF_A_DEAD_WRITER:
                    path.unlink()
            elif path.suffix in suffixes:
                found.append((stat.st_mtime, stat.st_size, path))
                total += stat.st_size
    for _, size, path in sorted(found):
        if total <= most_bytes:
            break
        if path.name not in used:
            path.unlink(missing_ok=True)
            total -= size
    return total
