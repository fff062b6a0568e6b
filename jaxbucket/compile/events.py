"""What jax's public monitoring events tell of compiling."""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import jax

_T = TypeVar("_T")
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class Trace(NamedTuple):
    """A function, and the shapes that it was traced with."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]


_name: ContextVar[str | None] = ContextVar("name", default=None)
_is_on_purpose: ContextVar[bool] = ContextVar("is on purpose", default=False)
_last_trace: ContextVar[Trace | None] = ContextVar("last trace", default=None)


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
    are counted too, under their own names; and what jax's compilation cache had,
    because the step waits for that as well.

    Yields:
      Name -> how often a function of that name was compiled so far, in any thread.
    """
    compiles: collections.Counter[str] = collections.Counter()

    def count(name: str) -> None:
        compiles[name] += 1

    stop = listen_to_compiles(count)
    try:
        yield compiles
    finally:
        stop()


def listen_to_compiles(listener: Callable[[str], None]) -> Callable[[], None]:
    """Calls a function with the name of each function that XLA has compiled.

    It is called where the compiling is done, in that thread; what it raises is raised
    there. Returns a function that ends it.
    """

    def listen(event: str, duration_secs: float, **details: Any) -> None:
        if event == _COMPILE_EVENT:
            name = _name.get() or str(details.get("fun_name", "?"))
            listener(name.removeprefix("jit(").removesuffix(")"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    return lambda: jax.monitoring.unregister_event_duration_listener(listen)


@contextlib.contextmanager
def set_within(variable: ContextVar[_T], value: _T) -> Iterator[None]:
    """Sets a context variable inside a `with` block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def compiling_as(name: str) -> contextlib.AbstractContextManager[None]:
    """Inside, what is compiled has this name, and not one of jax's own."""
    return set_within(_name, name)


def on_purpose() -> contextlib.AbstractContextManager[None]:
    """Inside, no guard minds what is compiled."""
    return set_within(_is_on_purpose, True)


def is_on_purpose() -> bool:
    """Whether what this thread compiles now is compiled on purpose."""
    return _is_on_purpose.get()


def record_arguments(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function to be jitted, which records what it is traced with.

    It is compiled right after that, in the same thread.
    """

    @functools.wraps(fn)
    def recording(*args: Any, **named: Any) -> Any:
        record_call(recording, (*args, *named.values()))
        return fn(*args, **named)

    # A partial has no name of its own.
    inner = getattr(fn, "func", fn)
    recording.__name__ = getattr(inner, "__name__", type(inner).__name__)
    return recording


def record_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Records that a function is traced with these, and compiled next."""
    # Their shapes: tracers would keep all that was traced.
    _last_trace.set(Trace(fn, shapes_of(args)))


def take_trace(name: str) -> Trace | None:
    """Returns what this thread has recorded of a function that it compiles, once."""
    trace = _last_trace.get()
    if trace is None or getattr(trace.fn, "__name__", None) != name:
        return None
    _last_trace.set(None)
    return trace


def shapes_of(tree: Any) -> Any:
    """Returns a tree with the shapes and dtypes of its arrays in place of these."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "dtype") else x,
        tree,
    )
