"""A guard over what XLA compiles once all is compiled."""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Literal, TypeAlias

from jaxbucket.compile.events import (
    Trace,
    is_own_compile,
    listen_to_compiles,
    take_trace,
)

OnCompile: TypeAlias = Literal["warn", "raise", "ignore"]


class CompileGuard:
    """Minds that a function is compiled, wherever it was called.

    It hears of it by jax's public monitoring events, which have a function's name. Of
    functions that note what they are traced with it is known which one it was, too.

    Args:
      step_fn: the jitted function.
      name: what jax calls it.
      action: what to do when it was compiled; "raise" raises where it was called.
      explain: says what is other than it was, as far as the trace tells.
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
            _Listener.add(self)

    @contextlib.contextmanager
    def expecting(self, difference: str) -> Iterator[None]:
        """What this function is compiled for inside differs in this."""
        token = _expected.set((self, difference))
        try:
            yield
        finally:
            _expected.reset(token)

    def is_of(self, name: str, trace: Trace | None) -> bool:
        """Whether what was compiled is this function."""
        return name == self._name and (trace is None or trace.fn is self._fn)

    def mind(self, trace: Trace | None, difference: str | None = None) -> None:
        """Warns or raises."""
        why = difference or self._explain(trace)
        message = f"XLA compiled `{self._name}` again: {why}"
        if self._action == "raise":
            raise RuntimeError(message)
        warnings.warn(message, RuntimeWarning, stacklevel=2)


_expected: ContextVar[tuple[CompileGuard, str] | None] = ContextVar(
    "expected", default=None
)


class _Listener:
    """One for all guards: they come and go with the steps that they are of."""

    lock = threading.Lock()
    guards: weakref.WeakSet[CompileGuard] = weakref.WeakSet()
    is_listening = False

    @classmethod
    def add(cls, guard: CompileGuard) -> None:
        with cls.lock:
            cls.guards.add(guard)
            if not cls.is_listening:
                listen_to_compiles(cls.heard)
                cls.is_listening = True

    @classmethod
    def heard(cls, name: str) -> None:
        trace = take_trace(name)
        if is_own_compile():
            return
        expected = _expected.get()
        if expected is not None and expected[0].is_of(name, trace):
            guard, difference = expected
            guard.mind(trace, difference)
            return
        # Steps that were compiled twice have two.
        with cls.lock:
            guards = list(cls.guards)
        for guard in [guard for guard in guards if guard.is_of(name, trace)][:1]:
            guard.mind(trace)
