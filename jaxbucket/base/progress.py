"""Progress bars, shown only on a terminal."""

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

# Seconds before `bar_if_slow` shows a bar.
_DELAY = 1.0
# Held while `bar_if_slow` may show a bar, so that nested calls show only one.
_bar_lock = threading.Lock()


def progress_bar(shown: bool = True, *more: ProgressColumn) -> Progress:
    """Returns a `rich` progress bar on standard error that disappears when it ends.

    Standard output stays free for results, because a program may read them.

    Args:
      shown: whether to show the bar if standard error is a terminal.
      more: columns to add to the default columns.
    """
    from rich.console import Console
    from rich.progress import Progress

    # This does not use rich's `is_terminal`, because FORCE_COLOR overrides it.
    is_shown = shown and sys.stderr.isatty()
    return Progress(
        *(*Progress.get_default_columns(), *more),
        # Quiet, because before rich 14.2 even a disabled bar prints an empty line.
        console=Console(stderr=True, quiet=not is_shown),
        transient=True,
        disable=not is_shown,
    )


def bar_if_slow(
    description: str,
) -> Callable[[Callable[_Args, _Result]], Callable[_Args, _Result]]:
    """Returns a decorator that shows a progress bar for calls longer than a second.

    The bar shows the elapsed time but no percentage, because the duration of a search
    is unknown. If decorated functions call one another, only the outermost one shows a
    bar. Without a terminal, no bar is shown.

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
    if not sys.stderr.isatty() or not _bar_lock.acquire(blocking=False):
        yield
        return
    done = threading.Event()
    thread = threading.Thread(target=_show_until, args=(description, done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        _bar_lock.release()


def _show_until(description: str, done: threading.Event) -> None:
    if done.wait(_DELAY):
        return
    from rich.progress import TimeElapsedColumn

    with progress_bar(True, TimeElapsedColumn()) as bar:
        bar.add_task(description, total=None)
        done.wait()
