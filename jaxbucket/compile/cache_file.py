"""Files that are read as they were written, or refused: a checksum, and a body.

A folder of them has a bound; the least recently used go first.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import stat
import time
import uuid

_MAGIC = b"jaxbucket 2 "
_DIGITS = 64
_PARTIAL = ".partial"
_SECONDS_OF_A_DEAD_WRITER = 3600


class BadFileError(ValueError):
    """A file that is cut, damaged or foreign."""


def read(path: pathlib.Path) -> bytes | None:
    """Returns the body of a file, None if there is no file.

    Raises:
      BadFileError: if it cannot be read, or is not what was written.
    """
    try:
        # Reading a pipe would block.
        if not stat.S_ISREG(path.stat().st_mode):
            raise BadFileError("is not a file")
        with path.open("rb") as file:
            # A foreign file may be of any size.
            magic = file.read(len(_MAGIC))
            content = file.read() if magic == _MAGIC else b""
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadFileError(f"cannot be read: {error}") from None
    if magic != _MAGIC:
        is_cut = _MAGIC.startswith(magic)
        raise BadFileError("is cut" if is_cut else "is not one of jaxbucket's")
    digest, body = content[:_DIGITS], content[_DIGITS:]
    if digest != _checksum(body):
        raise BadFileError("is cut or damaged")
    return body


def write(path: pathlib.Path, body: bytes) -> None:
    """Writes a file at once, whoever else writes the same.

    Raises:
      OSError: if it cannot be written; nothing of it is left then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}{_PARTIAL}")
    try:
        with partial.open("xb") as file:
            file.write(_MAGIC + _checksum(body) + body)
            file.flush()
            # A name without its bytes would outlive a machine that goes down.
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def touch(path: pathlib.Path) -> None:
    """Makes a file the most recently used one."""
    with contextlib.suppress(OSError):
        os.utime(path)


def last_use(path: pathlib.Path) -> int:
    """When a file was used, in nanoseconds; 0 if it is not there any more."""
    try:
        return path.lstat().st_mtime_ns
    except OSError:
        return 0


def clean_up(
    folder: pathlib.Path, suffixes: tuple[str, ...], max_bytes: int, used: set[str]
) -> int:
    """Removes the least recently used files, until the others fit.

    Args:
      folder: where; other files in it stay.
      suffixes: of the files that are ours.
      max_bytes: the most that all of them may have.
      used: names of those that stay.

    Returns:
      How many bytes they have.
    """
    files, total = [], 0
    for path in folder.iterdir():
        # Another process may remove it, and some we may not read.
        with contextlib.suppress(OSError):
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode):
                continue
            if path.name.endswith(_PARTIAL):
                if time.time() - status.st_mtime > _SECONDS_OF_A_DEAD_WRITER:
                    path.unlink()
            elif path.suffix in suffixes:
                files.append((status.st_mtime, status.st_size, path))
                total += status.st_size
    for _, size, path in sorted(files):
        if total > max_bytes and path.name not in used:
            path.unlink(missing_ok=True)
            total -= size
    return total


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode()
