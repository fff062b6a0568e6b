"""Runs functions in other threads with the caller's configuration of jax."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable
from typing import Any, TypeVar

import jax

# jax has no public access to a mesh that was entered by `with mesh:`.
from jax._src import mesh as jax_mesh

_R = TypeVar("_R")
# The type of settings that can be set per thread.
_CONFIG = type(jax.enable_x64)


def with_caller_config() -> Callable[..., Any]:
    """Returns `call(fn, *args)`, which calls a function as if in the current thread.

    The function sees the settings of this thread, such as those of
    `jax.enable_x64(...)`, its mesh and its context variables. Thread-local data of
    other packages is not passed on.
    """
    settings = [
        (manager, manager.value)
        for manager in vars(jax).values()
        if isinstance(manager, _CONFIG) and manager.value != manager.get_global()
    ]
    mesh = jax.sharding.get_mesh()
    entered = jax_mesh.thread_resources.env.physical_mesh
    context = contextvars.copy_context()

    def call(fn: Callable[..., _R], *args: Any) -> _R:
        with contextlib.ExitStack() as stack:
            for manager, value in settings:
                stack.enter_context(manager(value))
            if not entered.empty:
                stack.enter_context(entered)
            elif not mesh.empty:
                stack.enter_context(jax.set_mesh(mesh))
            # Copied, because only one thread at a time may enter a context.
            return context.copy().run(fn, *args)

    return call
