"""jax's own compilation cache, turned on by one argument, and off for a while."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

# What it has is not known to type checkers, of older versions at least.
_config: Any = jax.config


def use_xla_cache(folder: str | os.PathLike[str]) -> None:
    """Has jax keep all that XLA compiles from here on in a folder, however small.

    Raises:
      ValueError: if this process has another such folder already.
    """
    before, folder = _config.jax_compilation_cache_dir, os.fspath(folder)
    if before is not None and not _is_same(before, folder):
        raise ValueError(
            f"`xla_cache={folder!r}`: jax's compilation cache is {before!r} in this "
            "process already. Leave out `xla_cache`, or name that one."
        )
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if before is None:
        jax.config.update("jax_compilation_cache_dir", folder)
        # What was compiled before this has settled that there is none.
        compilation_cache.reset_cache()


def _is_same(folder: str, other: str) -> bool:
    # Of a URL this makes the same for the same.
    return os.path.abspath(folder) == os.path.abspath(other)


_lock = threading.Lock()
# How many threads have it off.
_num_off = 0


@contextlib.contextmanager
def without_xla_cache() -> Iterator[None]:
    """Has jax compile what is compiled inside, even if its cache has it.

    An executable of a CPU that came from there has no code in it when it is serialised
    once more: it is loaded, and fails when it runs.
    """
    global _num_off
    with _lock:
        # It may be off anyway.
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
    """Whether an executable may have come from jax's cache, and lost its code."""
    return platform == "cpu" and _config.jax_compilation_cache_dir is not None


def _switch(on: bool) -> None:
    if _config.jax_enable_compilation_cache != on:
        jax.config.update("jax_enable_compilation_cache", on)
        compilation_cache.reset_cache()
