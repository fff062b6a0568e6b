"""What jax's public monitoring events tell of compiling."""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
from jax.core import ShapedArray

_own_name: ContextVar[str | None] = ContextVar("own name", default=None)
_is_own: ContextVar[bool] = ContextVar("is own", default=False)
_last_trace: ContextVar[Trace | None] = ContextVar("last trace", default=None)
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@contextlib.contextmanager
def compiling_as(name: str) -> Iterator[None]:
    """Has `count_compiles` count by this name what jax calls by one of its own."""
    token = _own_name.set(name)
    try:
        yield
    finally:
        _own_name.reset(token)


@contextlib.contextmanager
def count_compiles() -> Iterator[collections.Counter[str]]:
    """Counts what XLA compiles inside a `with` block, by the function's name.

    Example:
      >>> import jax.numpy as jnp
      >>> def double(x):
      ...     return 2 * x
      >>> with count_compiles() as compiles:
      ...     for size in (3, 4, 3):
      ...         _ = jax.jit(double)(jnp.zeros(size))
      >>> compiles["double"]
      2

    It listens to jax's public monitoring events, so eager operations (`zeros` above)
    are counted too, under their own names; and what jax's compilation cache had, for
    the step waits for that as well.
    """
    compiles: collections.Counter[str] = collections.Counter()

    def count(name: str) -> None:
        compiles[name] += 1

    stop = listen_to_compiles(count)
    try:
        yield compiles
    finally:
        stop()


def listen_to_compiles(heard: Callable[[str], None]) -> Callable[[], None]:
    """Has a function called with the name of each that XLA has compiled.

    It is called where the compiling is done, in that thread; what it raises is raised
    there. Returns a function that ends it.
    """

    def listen(event: str, duration_secs: float, **details: Any) -> None:
        if event == _COMPILE_EVENT:
            name = _own_name.get() or str(details.get("fun_name", "?"))
            heard(name.removeprefix("jit(").removesuffix(")"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    return lambda: jax.monitoring.unregister_event_duration_listener(listen)


@contextlib.contextmanager
def own_compile() -> Iterator[None]:
    """What is compiled inside is on purpose, and no guard minds it."""
    token = _is_own.set(True)
    try:
        yield
    finally:
        _is_own.reset(token)


def is_own_compile() -> bool:
    """Whether what this thread compiles now is compiled on purpose."""
    return _is_own.get()


class Trace(NamedTuple):
    """What was traced, and with arguments of which shapes."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]


def record_arguments(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Has a function that is to be jitted note what it is traced with.

    It is compiled right after that, in the same thread.
    """

    @functools.wraps(fn)
    def noting(*args: Any, **named: Any) -> Any:
        record_call(noting, (*args, *named.values()))
        return fn(*args, **named)

    # A partial has no name of its own.
    inner = getattr(fn, "func", fn)
    noting.__name__ = getattr(inner, "__name__", type(inner).__name__)
    return noting


def record_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Notes that a function is traced with these, and compiled next."""
    # Their shapes: tracers would keep all that was traced.
    _last_trace.set(Trace(fn, jax.tree.map(_abstract, args)))


def _abstract(leaf: Any) -> Any:
    return ShapedArray(leaf.shape, leaf.dtype) if hasattr(leaf, "shape") else leaf


def take_trace(name: str) -> Trace | None:
    """What this thread has traced of a function, if it noted that, and not compiled."""
    trace = _last_trace.get()
    if trace is None or getattr(trace.fn, "__name__", None) != name:
        return None
    _last_trace.set(None)
    return trace
