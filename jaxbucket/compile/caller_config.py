"""The caller's configuration, for the threads that work for it."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable
from typing import Any, TypeVar

import jax

# There is no public way to a mesh that was entered by `with mesh:`.
from jax._src import mesh as jax_mesh

_R = TypeVar("_R")
# The type of settings that a thread may have of its own.
_CONFIG = type(jax.enable_x64)


def with_caller_config() -> Callable[..., Any]:
    """Returns `call(fn, *args)`, which runs in any thread as it would in this one.

    That is: with what `jax.enable_x64(...)` and all the others of its kind have set for
    this thread, with its mesh, and with its context variables. What other packages keep
    for a thread is not known here.
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
            # A context is entered by one thread at a time.
            return context.copy().run(fn, *args)

    return call
