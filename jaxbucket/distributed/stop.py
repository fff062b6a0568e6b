"""Ctrl-C and SIGTERM as a wish to stop, in all processes after the same step.

A process that was asked to stop cannot just do so: the others would wait for it in the
next step. Nor can they wait for one another in the loop, for one may be a step ahead,
within a collective. So a thread beside the loop agrees on a step: it holds the loop
before its next step, says which step that is, hears the same from all others, and lets
it go on; all of them stop before the first step that none has begun.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

import jax

from jaxbucket.distributed.processes import Processes

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_INTERVAL = 0.2
_REQUESTS = "stop request"


class StopRequest:
    """A context in which the first signal is a wish; a second one ends the process.

    Example:
      >>> with Processes() as processes, StopRequest(processes) as stop:
      ...     for step in range(100):
      ...         if stop.before(step):
      ...             break
      ...         signal.raise_signal(signal.SIGTERM)
      >>> print(step, stop.signal.name)
      1 SIGTERM

    Args:
      processes: those that are to stop together.

    Attributes:
      signal: the one that came, to whichever process; None before.
    """

    def __init__(self, processes: Processes):
        self.signal: signal.Signals | None = None
        self._noted: signal.Signals | None = None
        self._processes = processes
        self._number = str(processes.count_call(_REQUESTS))
        self._request = f"{_REQUESTS}/{self._number}"
        self._claiming = threading.Lock()
        self._leaving = False
        self._holding = threading.Lock()
        self._step = -1
        self._last: int | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=self._listen, name="jaxbucket stop", daemon=True
        )

    def __enter__(self) -> StopRequest:
        self._before = {number: signal.getsignal(number) for number in _SIGNALS}
        for number in _SIGNALS:
            signal.signal(number, self._note)
        if self._processes.count > 1:
            self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._processes.count > 1 and error == (None, None, None):
            self._leave_together()
        self._over.set()
        for number, handler in self._before.items():
            # None is one that was not set by Python, and cannot be set again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if self._noted is not None and self.signal is None and error[0] is None:
            # Too late to stop all for it: it is what it was without us.
            signal.raise_signal(self._noted)

    def before(self, step: int) -> bool:
        """Returns whether to stop before this step; to be asked before every one.

        In several processes the answer comes some steps after the signal, and is the
        same in all of them.
        """
        if self._processes.count == 1:
            return self.signal is not None
        with self._holding:
            self._step = step
            return self._last is not None and step > self._last

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = signal.Signals(number)
        if self._processes.count == 1:
            self.signal = self._noted
        for other in _SIGNALS:
            signal.signal(other, signal.SIG_DFL)

    def _listen(self) -> None:
        name = None
        while name is None and not self._over.is_set():
            # The store may be away for a moment: all others count on this thread.
            try:
                name = self._hear()
            except jax.errors.JaxRuntimeError:
                self._over.wait(_INTERVAL)
        if name is not None:
            try:
                self._agree(signal.Signals[name])
            except Exception as error:
                if not self._over.is_set():
                    self._processes.fail(error)

    def _hear(self) -> str | None:
        """Passes on what this process was asked, and waits a while for a request."""
        with self._claiming:
            if self._noted is not None and not self._leaving:
                self._processes.store.claim(self._request, self._noted.name)
        return self._processes.store.get(self._request, _INTERVAL)

    def _agree(self, number: signal.Signals) -> None:
        with self._holding:
            told = self._processes.gather("stop", str(self._step))
            self.signal = number
            self._last = max(map(int, told))

    def _leave_together(self) -> None:
        """Until all are here, each must be there to agree with the others."""
        with self._claiming:
            self._leaving = True
        own = self._noted.name if self._noted else ""
        told = self._processes.gather("stopped", own)
        # Nobody claims any more: either all listeners agree on a step, or none does.
        if self._number not in self._processes.store.below(_REQUESTS):
            self._over.set()
        self._thread.join()
        if self.signal is None and any(told):
            self.signal = signal.Signals[next(filter(None, told))]
