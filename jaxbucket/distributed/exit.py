"""Ends a process immediately, after printing a message."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import NoReturn

_SECONDS_TO_FLUSH = 1.0


def exit_now(status: int, message: str = "") -> NoReturn:
    """Exits without jax's own exit handlers, which wait for the other processes.

    Args:
      status: the exit status.
      message: printed to stderr first, if it is not empty.
    """
    print_to_stderr(message)
    # Flush in a thread, because the main thread may hang during a write.
    flush = threading.Thread(target=_flush, daemon=True)
    # While Python exits, it starts no threads, but flushes the streams itself.
    with contextlib.suppress(RuntimeError):
        flush.start()
        flush.join(_SECONDS_TO_FLUSH)
    os._exit(status)


def print_to_stderr(message: str) -> None:
    """Prints a message, if not empty, bypassing Python's buffers and their locks."""
    with contextlib.suppress(OSError):
        os.write(2, f"\njaxbucket: {message}\n".encode() if message else b"")


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
