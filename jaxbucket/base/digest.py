"""Digests of bytes and of files."""

import hashlib
from collections.abc import Iterable
from typing import Any


def digest(*parts: bytes | memoryview) -> str:
    """Returns the BLAKE2b digest of the concatenated parts, 32 hex digits."""
    return digest_all(parts)


def digest_all(parts: Iterable[bytes | memoryview]) -> str:
    """Returns `digest(*parts)`, with one part in memory at a time."""
    state = _new_state()
    for part in parts:
        state.update(part)
    return state.hexdigest()


def file_digest(path: Any) -> str:
    """Returns the BLAKE2b digest of the file at a `Path`, 32 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, _new_state).hexdigest()  # pyright: ignore


def _new_state() -> Any:
    return hashlib.blake2b(digest_size=16)
