"""Turns jax's own compilation cache on, and temporarily off."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

# Type checkers do not know its attributes, at least in older versions of jax.
_config: Any = jax.config


def use_xla_cache(folder: str | os.PathLike[str]) -> None:
    """Stores everything that XLA compiles from now on in a folder.

    It turns on jax's own compilation cache, for programs of every size. The cache saves
    the time of XLA, but not of tracing.

    Example:
      >>> jb.compile.use_xla_cache("/shared/xla")  # doctest: +SKIP

    Args:
      folder: the folder of the cache.
    """
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_compilation_cache_dir", os.fspath(folder))
    # An earlier compilation has recorded that there is no cache, or another one.
    compilation_cache.reset_cache()


@contextlib.contextmanager
def without_xla_cache() -> Iterator[None]:
    """Turns jax's compilation cache off inside a `with` block.

    A CPU executable that was loaded from that cache does not contain its code when it
    is serialized again: it can be loaded, but fails when it runs.
    """
    before = _config.jax_enable_compilation_cache
    _switch(False)
    try:
        yield
    finally:
        _switch(before)


def _switch(on: bool) -> None:
    if _config.jax_enable_compilation_cache != on:
        jax.config.update("jax_enable_compilation_cache", on)
        compilation_cache.reset_cache()
