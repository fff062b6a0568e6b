"""Counts compilations through jax's public monitoring events."""

from __future__ import annotations

import collections
import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import jax

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


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

    It warns if another library has removed all listeners within the block.

    Yields:
      Name -> number of compilations of functions of that name so far, in any thread.
    """
    compiles: collections.Counter[str] = collections.Counter()

    def receive(event: str, duration_secs: float, **details: Any) -> None:
        if event == _COMPILE_EVENT:
            name = str(details.get("fun_name", "?"))
            compiles[name.removeprefix("jit(").removesuffix(")")] += 1

    jax.monitoring.register_event_duration_secs_listener(receive)
    try:
        yield compiles
    finally:
        try:
            jax.monitoring.unregister_event_duration_listener(receive)
        except (AssertionError, ValueError):
            warnings.warn(
                "Another library has removed the listeners of jax's events, so that "
                "later compilations were not counted.",
                stacklevel=3,
            )
