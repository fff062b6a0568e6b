"""Names for contents."""

import hashlib


def digest(*parts: bytes | memoryview) -> str:
    """Returns 32 hex digits of BLAKE2b over the parts in turn."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        state.update(part)
    return state.hexdigest()
