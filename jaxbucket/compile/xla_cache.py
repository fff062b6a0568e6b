"""Turns jax's own compilation cache on, and temporarily off."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

# Type checkers do not know its attributes, at least in older versions of jax.
_config: Any = jax.config


def use_xla_cache(folder: str | os.PathLike[str]) -> None:
    """Stores everything that XLA compiles from now on in a folder.

    It turns on jax's own compilation cache, for programs of every size.

    Args:
      folder: the folder of the cache.

    Raises:
      ValueError: if jax's cache already uses a different folder in this process.
    """
    before, folder = _config.jax_compilation_cache_dir, os.fspath(folder)
    if before is not None and not _is_same(before, folder):
        raise ValueError(
            f"`xla_cache={folder!r}`: jax's compilation cache is already {before!r} in "
            "this process. Remove `xla_cache`, or pass that folder."
        )
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if before is None:
        jax.config.update("jax_compilation_cache_dir", folder)
        # An earlier compilation has recorded that there is no cache.
        compilation_cache.reset_cache()


def _is_same(folder: str, other: str) -> bool:
    # Equal URLs remain equal, too.
    return os.path.abspath(folder) == os.path.abspath(other)


_lock = threading.Lock()
# The number of threads that have turned the cache off.
_num_off = 0


@contextlib.contextmanager
def without_xla_cache() -> Iterator[None]:
    """Turns jax's compilation cache off inside a `with` block.

    A CPU executable that was loaded from that cache does not contain its code when it
    is serialized again: it can be loaded, but fails when it runs.
    """
    global _num_off
    with _lock:
        # The user may have turned it off.
        is_used = _num_off > 0 or _config.jax_enable_compilation_cache
        _num_off += is_used
        _switch(False)
    try:
        yield
    finally:
        with _lock:
            _num_off -= is_used
            _switch(is_used and not _num_off)


def may_lack_code(platform: str) -> bool:
    """Returns whether an executable may have lost its code in jax's cache."""
    return platform == "cpu" and _config.jax_compilation_cache_dir is not None


def _switch(on: bool) -> None:
    if _config.jax_enable_compilation_cache != on:
        jax.config.update("jax_enable_compilation_cache", on)
        compilation_cache.reset_cache()
