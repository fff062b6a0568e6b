"""A cache of recent results, which a schedule can take along to worker processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

# All schedules share this lock, because one with its own lock could not be sent to
# worker processes. It is reentrant, because a pacing function may use another schedule.
_LOCK = threading.RLock()
# Loaders that read ahead may already be in the next epoch.
_NUM_CACHED = 2


def recent(cache: dict[Key, Value], key: Key, make: Callable[[], Value]) -> Value:
    """Returns `cache[key]`, or makes it and keeps the two that were made last."""
    with _LOCK:
        if key not in cache:
            cache[key] = make()
            for old in list(cache)[:-_NUM_CACHED]:
                del cache[old]
        return cache[key]
