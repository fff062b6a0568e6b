"""jax's own compilation cache, turned on by one argument."""

from __future__ import annotations

import os

import jax
from jax.experimental.compilation_cache import compilation_cache


def use_xla_cache(folder: str | os.PathLike[str]) -> None:
    """Has jax keep all that XLA compiles from here on in a folder, however small.

    Raises:
      ValueError: if this process has another such folder already.
    """
    before, folder = jax.config.jax_compilation_cache_dir, os.fspath(folder)
    if before not in (None, folder):
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
