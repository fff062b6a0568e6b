"""How a process ends at once, and still says why."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

_SECONDS_TO_SPEAK = 1.0
_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)


def leave(status: int, sentence: str = "") -> NoReturn:
    """Ends the process without what waits for others: jax's own way out does."""
    speak(sentence)
    os._exit(status)


def speak(sentence: str) -> None:
    """Prints it, if there is one, behind all that was printed before."""
    # In a thread, for the main one may hang in the middle of a write.
    speaker = threading.Thread(target=_print, args=(sentence,), daemon=True)
    try:
        speaker.start()
        speaker.join(_SECONDS_TO_SPEAK)
    except RuntimeError:
        # Python itself is on its way out, and starts no threads any more.
        _print(sentence)


def _print(sentence: str) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if sentence and stream is sys.stderr:
                print(f"\njaxbucket: {sentence}", file=stream)
            stream.flush()


@contextlib.contextmanager
def before_abort(speak: Callable[[], None]) -> Iterator[None]:
    """Calls a function where the C library would end the process by SIGABRT.

    jax does so where its coordination service fails, in a thread of its own, at once;
    Python's own signal handlers would come too late. This one runs in that thread, as
    soon as it has Python's lock. If it returns, the process is aborted.
    """

    def handle(number: int) -> None:
        # What is left to do is done without us.
        _install(before)
        speak()

    handler = _HANDLER(handle)
    before = _install(ctypes.cast(handler, ctypes.c_void_p))
    try:
        yield
    finally:
        _install(before)


def _install(handler: Any) -> Any:
    """Sets the C library's handler of SIGABRT; returns the one before."""
    install = ctypes.CDLL(None).signal
    install.argtypes = [ctypes.c_int, ctypes.c_void_p]
    install.restype = ctypes.c_void_p
    return install(signal.SIGABRT, handler)
