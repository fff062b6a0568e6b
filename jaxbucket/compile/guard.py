"""A guard over what XLA compiles once all is compiled."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Literal, TypeAlias

from jaxbucket.compile.events import (
    Trace,
    is_on_purpose,
    listen_to_compiles,
    set_within,
    take_trace,
)

OnCompile: TypeAlias = Literal["warn", "raise", "ignore"]


class CompileGuard:
    """Warns or raises where a function is compiled again, wherever it was called.

    jax's public monitoring events tell a function's name. Of functions that record
    their arguments it is known which one it was, too.

    Args:
      step_fn: the jitted function.
      name: what jax calls it.
      action: what to do when it was compiled; "raise" raises where it was called.
      explain: says what differs from what was compiled, as far as the trace tells.
    """

    def __init__(
        self,
        step_fn: Any,
        name: str,
        action: OnCompile,
        explain: Callable[[Trace | None], str],
    ):
        self._fn = getattr(step_fn, "__wrapped__", None)
        self._name = name
        self._action = action
        self._explain = explain
        if action != "ignore":
            _listen()
            with _lock:
                _guards.add(self)

    def expecting(self, difference: str) -> contextlib.AbstractContextManager[None]:
        """Inside, this function is compiled for what differs in this."""
        return set_within(_expected, (self, difference))

    def is_of(self, name: str, trace: Trace | None) -> bool:
        """Whether what was compiled is this function."""
        return name == self._name and (trace is None or trace.fn is self._fn)

    def report(self, trace: Trace | None, difference: str | None = None) -> None:
        """Warns or raises, or does not."""
        if self._action == "ignore":
            return
        why = difference or self._explain(trace)
        message = f"XLA compiled `{self._name}` again: {why}"
        if self._action == "raise":
            raise RuntimeError(message)
        warnings.warn(message, RuntimeWarning, stacklevel=2)


_expected: ContextVar[tuple[CompileGuard, str] | None] = ContextVar(
    "expected", default=None
)
# They come and go with the steps that they are of.
_guards: weakref.WeakSet[CompileGuard] = weakref.WeakSet()
_lock = threading.Lock()


@functools.cache
def _listen() -> None:
    """One listener for all guards, because a trace is taken once."""
    listen_to_compiles(_on_compile)


def _on_compile(name: str) -> None:
    trace = take_trace(name)
    if is_on_purpose():
        return
    expected = _expected.get()
    if expected is not None and expected[0].is_of(name, trace):
        guard, difference = expected
        guard.report(trace, difference)
        return
    with _lock:
        guards = [guard for guard in _guards if guard.is_of(name, trace)]
    # Steps that were compiled twice have two.
    for guard in guards[:1]:
        guard.report(trace)
