"""Progress bars: on a terminal, and nowhere else."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")

# Seconds that pass without a bar.
_PATIENCE = 1.0
_shown = threading.Lock()


def progress_bar(shown: bool = True, *more: ProgressColumn) -> Progress:
    """Returns a bar of `rich` on standard error, which is gone when it is over.

    Not where results are printed, for these may well be read by a program.

    Args:
      shown: show it, if standard error is a terminal.
      more: columns beside the usual ones.
    """
    from rich.console import Console
    from rich.progress import Progress

    return Progress(
        *(*Progress.get_default_columns(), *more),
        console=Console(stderr=True),
        transient=True,
        # On none it would leave an empty line among errors. Not `is_terminal`, which
        # believes FORCE_COLOR.
        disable=not (shown and sys.stderr.isatty()),
    )


def bar_if_slow(
    description: str,
) -> Callable[[Callable[_Args, _Result]], Callable[_Args, _Result]]:
    """Returns a decorator that shows a bar, on a terminal, once a second has passed.

    Of searches nobody knows how long they take: the bar moves, and tells the time. A
    function that is called by another one with a bar has none of its own.

    Example:
      >>> @bar_if_slow("Adding")
      ... def add(a, b):
      ...     return a + b
      >>> add(1, b=2)
      3
    """

    def decorator(function: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
        @functools.wraps(function)
        def wrapped(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
            with _late_bar(description):
                return function(*args, **kwargs)

        return wrapped

    return decorator


@contextlib.contextmanager
def _late_bar(description: str) -> Iterator[None]:
    # No thread where nobody looks, and one bar at a time.
    if not sys.stderr.isatty() or not _shown.acquire(blocking=False):
        yield
        return
    is_over = threading.Event()
    thread = threading.Thread(
        target=_show_until, args=(description, is_over), daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        _shown.release()


def _show_until(description: str, is_over: threading.Event) -> None:
    if is_over.wait(_PATIENCE):
        return
    from rich.progress import TimeElapsedColumn

    with progress_bar(True, TimeElapsedColumn()) as bar:
        bar.add_task(description, total=None)
        is_over.wait()
