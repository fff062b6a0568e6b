"""Ctrl-C and SIGTERM as a wish to stop, not as the end in the middle of a step."""

import signal
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Takes note of the first signal; a second one ends the process at once.

    Attributes:
      signal: the one that came, or None.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __enter__(self) -> "StopRequest":
        self._before = {number: signal.getsignal(number) for number in _SIGNALS}
        for number in _SIGNALS:
            signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        for other in _SIGNALS:
            signal.signal(other, signal.SIG_DFL)
