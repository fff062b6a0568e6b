"""Digests of bytes and of files."""

import hashlib
import os
import pathlib
from collections.abc import Iterable
from typing import IO, Any


def digest(*parts: bytes | memoryview) -> str:
    """Returns the BLAKE2b digest of the concatenated parts, 32 hex digits."""
    return digest_all(parts)


def digest_all(parts: Iterable[bytes | memoryview]) -> str:
    """Returns `digest(*parts)`, with one part in memory at a time."""
    state = _new_state()
    for part in parts:
        state.update(part)
    return state.hexdigest()


def file_digest(path: str | os.PathLike[str]) -> str:
    """Returns the BLAKE2b digest of a file, 32 hex digits."""
    with pathlib.Path(path).open("rb") as file:
        return stream_digest(file)


def stream_digest(file: IO[bytes]) -> str:
    """Returns the BLAKE2b digest of the rest of an open file, 32 hex digits."""
    return hashlib.file_digest(file, _new_state).hexdigest()  # pyright: ignore


def _new_state() -> Any:
    return hashlib.blake2b(digest_size=16)
