"""Files that consist of a checksum and a body, in a folder of limited size.

A file whose checksum does not match is rejected. If the folder becomes too large, the
least recently used files are removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import stat
import tempfile
import time
import uuid

_MAGIC = b"jaxbucket 2 "
_DIGITS = 64
_PARTIAL = ".partial"
_STALE_SECONDS = 3600


class BadFileError(ValueError):
    """A file that is truncated, damaged or not from jaxbucket."""


def read(path: pathlib.Path) -> bytes | None:
    """Returns the body of a file; None if there is no file.

    Raises:
      BadFileError: if the file cannot be read, or has changed since it was written.
    """
    try:
        # Reading a named pipe would block.
        if not stat.S_ISREG(path.stat().st_mode):
            raise BadFileError("is not a file")
        with path.open("rb") as file:
            # Other programs' files may be huge, and are not read.
            magic = file.read(len(_MAGIC))
            content = file.read() if magic == _MAGIC else b""
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadFileError(f"cannot be read: {error}") from None
    if magic != _MAGIC:
        is_truncated = _MAGIC.startswith(magic)
        raise BadFileError("is truncated" if is_truncated else "is not from jaxbucket")
    digest, body = content[:_DIGITS], content[_DIGITS:]
    if digest != _checksum(body):
        raise BadFileError("is truncated or damaged")
    return body


def write(path: pathlib.Path, body: bytes) -> None:
    """Writes a file atomically, even if other processes write the same file.

    Raises:
      OSError: if the file cannot be written. No partial file is left then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}{_PARTIAL}")
    try:
        with partial.open("xb") as file:
            file.write(_MAGIC + _checksum(body) + body)
            file.flush()
            # After a crash of the machine, the name could exist without the bytes.
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def check_writable(name: str, folder: pathlib.Path) -> None:
    """Creates a folder, the argument `name`, or raises a ValueError if it cannot."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(
            f"`{name}={str(folder)!r}` cannot be written: {error.strerror}. Choose a "
            "folder that you may write to, on a disk with free space."
        ) from None


def touch(path: pathlib.Path) -> None:
    """Marks a file as the most recently used one."""
    with contextlib.suppress(OSError):
        os.utime(path)


def last_use(path: pathlib.Path) -> int:
    """Returns the time of a file's last use in nanoseconds; 0 if it does not exist."""
    try:
        return path.lstat().st_mtime_ns
    except OSError:
        return 0


def clean_up(
    folder: pathlib.Path, suffixes: tuple[str, ...], max_bytes: int, used: set[str]
) -> int:
    """Removes the least recently used files until the rest are within a limit.

    Args:
      folder: the folder. Files with other suffixes are not touched.
      suffixes: the suffixes of the files that may be removed.
      max_bytes: the limit on the total size of these files.
      used: the names of files that must not be removed.

    Returns:
      The total size of the remaining files in bytes.
    """
    files, total = [], 0
    for path in folder.iterdir():
        # Another process may remove the file, or it may not be readable.
        with contextlib.suppress(OSError):
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode):
                continue
            if path.name.endswith(_PARTIAL):
                if time.time() - status.st_mtime > _STALE_SECONDS:
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
