"""Reports functions that XLA compiles although they were compiled ahead of time."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from jaxbucket.compile.events import Trace, are_compiles_allowed, listen

OnCompile: TypeAlias = Literal["warn", "raise", "ignore"]


class CompileGuard:
    """Warns or raises if a function is compiled again, wherever it is called.

    jax's public monitoring events contain the name of the compiled function. If a
    function records its arguments (`record_arguments`), it is also told apart from
    others of the same name.

    Args:
      step_fn: the jitted function.
      name: the name that jax uses for it.
      action: the action after a compilation; "raise" raises in the calling code.
      explain: returns how the call differs from the compiled programs, given the trace
        if it is known.
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
            listen(_on_compile)
            with _lock:
                _guards.add(self)

    def matches(self, name: str, trace: Trace | None) -> bool:
        """Returns whether a compiled function is the guarded one."""
        return name == self._name and (trace is None or trace.fn is self._fn)

    def report(self, reason: str) -> None:
        """Warns or raises, as configured, about a compilation with this reason."""
        message = f"XLA compiled `{self._name}` again: {reason}"
        if self._action == "raise":
            raise RuntimeError(message)
        if self._action == "warn":
            warnings.warn(message, RuntimeWarning, stacklevel=2)


# Weak references, because a guard must not outlive its steps.
_guards: weakref.WeakSet[CompileGuard] = weakref.WeakSet()
_lock = threading.Lock()


def _on_compile(name: str, trace: Trace | None) -> None:
    if are_compiles_allowed():
        return
    with _lock:
        guards = [guard for guard in _guards if guard.matches(name, trace)]
    # A function compiled ahead of time twice has two guards. One report is enough.
    for guard in guards[:1]:
        guard.report(guard.explain(trace))
