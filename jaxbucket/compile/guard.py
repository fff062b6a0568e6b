"""A guard over what XLA compiles once all is compiled."""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from jaxbucket.compile.events import (
    Trace,
    is_on_purpose,
    listen_to_compiles,
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
        self.explain = explain
        if action != "ignore":
            _listen()
            with _lock:
                _guards.add(self)

    def is_of(self, name: str, trace: Trace | None) -> bool:
        """Whether what was compiled is this function."""
        return name == self._name and (trace is None or trace.fn is self._fn)

    def report(self, why: str) -> None:
        """Warns or raises, or ignores it."""
        message = f"XLA compiled `{self._name}` again: {why}"
        if self._action == "raise":
            raise RuntimeError(message)
        if self._action == "warn":
            warnings.warn(message, RuntimeWarning, stacklevel=2)


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
    with _lock:
        guards = [guard for guard in _guards if guard.is_of(name, trace)]
    # Steps that were compiled twice have two.
    for guard in guards[:1]:
        guard.report(guard.explain(trace))
