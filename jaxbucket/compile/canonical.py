"""Converts values to JSON that is equal in all processes, and digests it."""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax


def canonical(value: Any, fallback: Callable[[Any], Any]) -> Any:
    """Returns JSON for a value, independent of the order of its sets and mappings.

    Args:
      value: constants, containers, devices and meshes.
      fallback: converts values of any other type.
    """
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return repr(value)
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, jax.Device):
        return f"{value.platform} {value.id}"
    if isinstance(value, jax.sharding.AbstractMesh):
        return str(value)
    if isinstance(value, jax.sharding.Mesh):
        devices = [canonical(device, fallback) for device in value.devices.flat]
        return [f"{dict(value.shape)} {value.axis_types}", devices]
    if isinstance(value, Mapping):
        pairs = [[canonical(x, fallback) for x in pair] for pair in value.items()]
        return ["dict", *sorted(pairs, key=str)]
    if isinstance(value, tuple | list | set | frozenset):
        items = [canonical(item, fallback) for item in value]
        # The order of a set depends on the hashes of strings in this process.
        is_ordered = isinstance(value, tuple | list)
        return [
            type(value).__name__,
            *(items if is_ordered else sorted(items, key=str)),
        ]
    return fallback(value)


def digest(value: Any) -> str:
    """Returns a digest of 32 hexadecimal digits of a JSON value."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
