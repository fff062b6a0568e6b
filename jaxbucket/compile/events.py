"""Observes compilations through jax's public monitoring events."""

from __future__ import annotations

import collections
import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax

_T = TypeVar("_T")
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class Trace(NamedTuple):
    """A function, and the shapes of the arguments that it was traced with."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]


_name: ContextVar[str | None] = ContextVar("name", default=None)
_are_compiles_allowed: ContextVar[bool] = ContextVar(
    "are compiles allowed", default=False
)
_last_trace: ContextVar[Trace | None] = ContextVar("last trace", default=None)
# Called with the name of a function that XLA compiles, and its trace if it is known.
_Listener: TypeAlias = Callable[[str, Trace | None], None]
_listeners: list[_Listener] = []


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
    jax's compilation cache, because a step waits for these as well.

    Yields:
      Name -> number of compilations of functions of that name so far, in any thread.
    """
    compiles: collections.Counter[str] = collections.Counter()

    def count(name: str, trace: Trace | None) -> None:
        compiles[name] += 1

    listen(count)
    try:
        yield compiles
    finally:
        _listeners.remove(count)


def listen(listener: _Listener) -> None:
    """Calls a listener whenever XLA compiles a function, in the compiling thread."""
    _register()
    if listener not in _listeners:
        _listeners.append(listener)


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
        name = _name.get() or str(details.get("fun_name", "?"))
        name = name.removeprefix("jit(").removesuffix(")")
        trace = take_trace(name)
        for listener in tuple(_listeners):
            listener(name, trace)


@contextlib.contextmanager
def set_within(variable: ContextVar[_T], value: _T) -> Iterator[None]:
    """Sets a context variable inside a `with` block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def compiling_as(name: str) -> contextlib.AbstractContextManager[None]:
    """Reports compilations inside a `with` block under this name."""
    return set_within(_name, name)


def allow_compiles() -> contextlib.AbstractContextManager[None]:
    """Turns guards off for compilations inside a `with` block."""
    return set_within(_are_compiles_allowed, True)


def are_compiles_allowed() -> bool:
    """Returns whether guards are turned off in this thread."""
    return _are_compiles_allowed.get()


def record_arguments(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that records the arguments with which it is traced.

    The result is meant to be jitted. jax compiles it in the same thread, right after it
    was traced, so that the record belongs to the next compilation.
    """

    @functools.wraps(fn)
    def recording(*args: Any, **named: Any) -> Any:
        record_call(recording, (*args, *named.values()))
        return fn(*args, **named)

    # A partial has no name.
    inner = getattr(fn, "func", fn)
    recording.__name__ = getattr(inner, "__name__", type(inner).__name__)
    return recording


def record_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Records the arguments of a function that is being traced."""
    # Only their shapes, because tracers would keep the whole trace alive.
    _last_trace.set(Trace(fn, shapes_of(args)))


def take_trace(name: str) -> Trace | None:
    """Returns and removes this thread's last trace, if its function has this name."""
    trace = _last_trace.get()
    if trace is None or getattr(trace.fn, "__name__", None) != name:
        return None
    _last_trace.set(None)
    return trace


def shapes_of(tree: Any) -> Any:
    """Returns a tree in which each array is replaced by its shape and dtype."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "dtype") else x,
        tree,
    )
