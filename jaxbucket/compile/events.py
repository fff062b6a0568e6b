"""Counts compilations through jax's public monitoring events."""

from __future__ import annotations

import collections
import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any

import jax

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_counters: list[collections.Counter[str]] = []


@contextlib.contextmanager
def count_compiles() -> Iterator[collections.Counter[str]]:
    """Counts the functions that XLA compiles inside a `with` block, by name.

    Example:
      >>> import jax.numpy as jnp
      >>> def double(x):
      ...     return 2 * x
      >>> with count_compiles() as compiles:
      ...     for size in (3, 4, 3):
      ...         _ = jax.jit(double)(jnp.zeros(size))
      >>> compiles["double"]
      2

    It listens to jax's public monitoring events. So it also counts eager operations
    (such as `zeros` above) under their own names, and programs that were loaded from
    jax's compilation cache, because a step waits for these as well. All functions of
    `jax.pmap` have the name `_fun`.

    Yields:
      Name -> number of compilations of functions of that name so far, in any thread.
    """
    compiles: collections.Counter[str] = collections.Counter()
    _register()
    _counters.append(compiles)
    try:
        yield compiles
    finally:
        # By identity, because counters with the same counts are equal.
        _counters[:] = [x for x in _counters if x is not compiles]


@functools.cache
def _register() -> None:
    """Starts to pass jax's events to `_receive`, as long as the process lives."""
    # Only jax holds this object. So it is finalized if another library clears all of
    # jax's listeners, and the next one takes its place.
    receiver = functools.partial(_receive)
    jax.monitoring.register_event_duration_secs_listener(receiver)
    weakref.finalize(receiver, _register.__wrapped__).atexit = False


def _receive(event: str, duration_secs: float, **details: Any) -> None:
    if event == _COMPILE_EVENT:
        name = str(details.get("fun_name", "?"))
        for compiles in tuple(_counters):
            compiles[name.removeprefix("jit(").removesuffix(")")] += 1
