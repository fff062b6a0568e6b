"""A digest of bytes."""

import hashlib


def digest(*parts: bytes | memoryview) -> str:
    """Returns the BLAKE2b digest of the concatenated parts, 32 hex digits."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        state.update(part)
    return state.hexdigest()
