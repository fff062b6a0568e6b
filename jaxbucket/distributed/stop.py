"""Handles Ctrl-C and SIGTERM as a request to stop all processes before the same step.

A process that receives a signal must not stop alone, because the others would wait for
it in the next step. jax's preemption service detects SIGTERM in any process, notifies
all of them, and chooses a step that none has started. Orbax uses it, too. Ctrl-C is
passed on to the same service.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

from jax.experimental import multihost_utils

from jaxbucket.distributed.processes import Processes


class StopRequest:
    """A context in which SIGINT and SIGTERM request a stop before the next step.

    A second Ctrl-C ends the process immediately. With several processes, a request
    applies to the rest of the run: a loop that starts later stops before its first
    step.

    Example:
      >>> with Processes() as processes, StopRequest(processes) as stop:
      ...     for step in range(100):
      ...         if stop.before(step):
      ...             break
      ...         signal.raise_signal(signal.SIGTERM)
      >>> print(step, stop.signal.name)
      1 SIGTERM

    Args:
      processes: the processes that stop together.

    Attributes:
      signal: the signal that any of the processes received; None without a request.
    """

    def __init__(self, processes: Processes):
        self.signal: signal.Signals | None = None
        self._processes = processes
        self._received: signal.Signals | None = None
        self._last_step: int | None = None
        self._signals = [signal.SIGINT]
        # With several processes, jax handles SIGTERM itself.
        if processes.count == 1:
            self._signals.append(signal.SIGTERM)

    def __enter__(self) -> StopRequest:
        self._handlers = {x: signal.getsignal(x) for x in self._signals}
        for number in self._signals:
            signal.signal(number, self._receive)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, where: Any) -> None:
        try:
            if error is None and self.signal is None:
                self.signal = self._agree()
        finally:
            for number, handler in self._handlers.items():
                # A handler that Python has not installed is None, and cannot be
                # restored.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if error is None and self.signal is None and self._received is not None:
            # The signal came too late to stop all processes. Handle it as usual.
            signal.raise_signal(self._received)

    def before(self, step: int) -> bool:
        """Returns whether to stop before this step. Call it before every step.

        With several processes the result is the same in all of them, and becomes True
        a few steps after the signal.

        Other code that registers steps with jax's preemption service, such as Orbax,
        must use the same step numbers, because the service has a single counter.

        Args:
          step: the number of the step, one higher with each call.

        Raises:
          ValueError: if a step was skipped or repeated.
        """
        if self.signal is not None:
            return True
        last, self._last_step = self._last_step, step
        if last is not None and step != last + 1:
            raise ValueError(
                f"`step={step}` follows step {last}. Call `before` before every step, "
                "with consecutive numbers."
            )
        if self._processes.count > 1 and self._is_requested(step, last is None):
            self.signal = self._agree()
        return self.signal is not None

    def _is_requested(self, step: int, is_first: bool) -> bool:
        self._forward_signal()
        # If the request came before the first step, jax had no step to stop at. From
        # this call on it only chooses later steps.
        is_sync_point = multihost_utils.reached_preemption_sync_point(step)
        return is_sync_point or is_first

    def _agree(self) -> signal.Signals | None:
        """Returns a signal that one of the processes has received, if any."""
        self._forward_signal()
        received = self._received
        if received is None and self._processes.count > 1:
            if self._processes.store.has_preemption_notice():
                received = signal.SIGTERM
        replies = self._processes.gather("stop", received.name if received else "")
        # Ctrl-C in one process is a preemption notice, so SIGTERM, in the others.
        # SIGINT sorts first.
        names = sorted({name for name in replies if name})
        return signal.Signals[names[0]] if names else None

    def _forward_signal(self) -> None:
        if self._received is not None and self._processes.count > 1:
            self._processes.store.set_preemption_notice()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = signal.Signals(number)
        if self._processes.count == 1:
            self.signal = self._received
        for handled in self._signals:
            signal.signal(handled, signal.SIG_DFL)
