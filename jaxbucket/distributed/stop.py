"""Ctrl-C and SIGTERM as a request to stop, in all processes before the same step.

A process that was asked to stop cannot just do so: the others would wait for it in the
next step. jax's preemption service hears SIGTERM in any of the processes, tells all of
them, and finds a step that none has begun; Orbax asks it, too. Ctrl-C is put to it in
the same way.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

from jax.experimental import multihost_utils

from jaxbucket.distributed.processes import Processes
from jaxbucket.distributed.store import has_preemption_service


class StopRequest:
    """A context in which a signal is a request; a second Ctrl-C ends the process.

    In several processes a request stands for the rest of the run: whatever loop begins
    later stops before its first step.

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

    Raises:
      ValueError: on entering, if jax's preemption service is off.
    """

    def __init__(self, processes: Processes):
        self.signal: signal.Signals | None = None
        self._processes = processes
        self._received: signal.Signals | None = None
        self._last_step: int | None = None
        self._signals = [signal.SIGINT]
        # Where jax has connected several processes it hears SIGTERM itself.
        if processes.count == 1:
            self._signals.append(signal.SIGTERM)

    def __enter__(self) -> StopRequest:
        if self._processes.count > 1 and not has_preemption_service():
            raise ValueError(
                "`StopRequest` asks jax's preemption service: leave "
                "`jax_enable_preemption_service` on."
            )
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
                # None is one that was not set by Python, and cannot be set again.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if error is None and self.signal is None and self._received is not None:
            # It came too late to stop all: it is what it was without us.
            signal.raise_signal(self._received)

    def before(self, step: int) -> bool:
        """Returns whether to stop before this step; to be asked before every one.

        In several processes the answer comes some steps after the signal, and is the
        same in all of them.

        Whoever else registers steps with jax's preemption service, as Orbax does, must
        use the same numbers, because the service counts them all as one.

        Args:
          step: the number of the step, one higher from call to call.

        Raises:
          ValueError: if a step was left out, or comes again.
        """
        if self.signal is not None:
            return True
        last, self._last_step = self._last_step, step
        if last is not None and step != last + 1:
            raise ValueError(
                f"`step={step}` comes after {last}: ask before every step, each one "
                "higher than the one before."
            )
        if self._processes.count > 1 and self._is_requested(step, last is None):
            self.signal = self._agree()
        return self.signal is not None

    def _is_requested(self, step: int, is_first: bool) -> bool:
        self._pass_on()
        # A request that was there before the first step has found no step to stop at.
        # From this call on, whatever jax agrees on is a later one.
        is_sync_point = multihost_utils.reached_preemption_sync_point(step)
        return is_sync_point or is_first

    def _agree(self) -> signal.Signals | None:
        """Returns the signal that any of the processes knows of."""
        self._pass_on()
        own = self._received
        if own is None and self._processes.count > 1:
            if self._processes.store.has_preemption_notice():
                own = signal.SIGTERM
        names = self._processes.gather("stop", own.name if own else "")
        # Ctrl-C in one process is a notice in the others.
        known = sorted({name for name in names if name})
        return signal.Signals[known[0]] if known else None

    def _pass_on(self) -> None:
        if self._received is not None and self._processes.count > 1:
            self._processes.store.give_preemption_notice()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = signal.Signals(number)
        if self._processes.count == 1:
            self.signal = self._received
        for other in self._signals:
            signal.signal(other, signal.SIG_DFL)
