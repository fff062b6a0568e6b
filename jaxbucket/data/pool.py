"""Calls a function of index ranges in worker processes."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from typing import Any, TypeAlias

import cloudpickle

# `(start, stop)`, the examples `start <= index < stop`.
Span: TypeAlias = tuple[int, int]


def map_spans(
    function: Callable[[int, int], Any], spans: Sequence[Span], num_workers: int
) -> Iterator[tuple[Span, Any]]:
    """Yields each span and its result as soon as it is there, in any order.

    Args:
      function: function from `(start, stop)` to the result of these examples.
      spans: the spans.
      num_workers: number of worker processes; 0 calls the function in this process.

    Raises:
      RuntimeError: if a worker process dies.
    """
    if not num_workers:
        yield from ((span, function(*span)) for span in spans)
        return
    # cloudpickle, unlike pickle, handles functions of scripts and nested functions.
    task = cloudpickle.dumps(function)
    # Spawned, because forking a process with jax threads can deadlock.
    pool = ProcessPoolExecutor(num_workers, get_context("spawn"), _init, (task,))
    try:
        running = {pool.submit(_call, *span): span for span in spans}
        for future in as_completed(running):
            yield running[future], future.result()
    except BrokenProcessPool:
        raise RuntimeError(
            "A worker process died: for lack of memory, or because the main script, "
            'which workers import, has no `if __name__ == "__main__":` guard. Put the '
            "code that the script runs under the guard, or use fewer workers."
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


_task: bytes


def _init(task: bytes) -> None:
    global _task
    exit_with_parent()
    _task = task


def _call(start: int, stop: int) -> Any:
    return _load()(start, stop)


@functools.cache
def _load() -> Callable[[int, int], Any]:
    # Not in `_init`, whose errors are lost.
    return cloudpickle.loads(_task)


def exit_with_parent() -> None:
    """Makes this process exit when its parent process exits, even if it is busy."""
    threading.Thread(target=_exit_after_parent, daemon=True).start()


def _exit_after_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
