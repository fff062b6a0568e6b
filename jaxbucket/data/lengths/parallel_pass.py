"""One pass over a source in chunks, in this process or in worker processes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context
from multiprocessing.process import BaseProcess
from typing import Any, TypeAlias

import cloudpickle

from jaxbucket.base.checks import check_integer
from jaxbucket.base.progress import progress_bar
from jaxbucket.data.worker_exit import (
    MISSING_GUARD,
    exit_if_importing,
    exit_with_parent,
    missing_guard_message,
)

# Number of examples measured as one unit. At most this many are lost on a crash.
_CHUNK = 1024
# What a script without a guard may call.
_CALLS = "measure_lengths(...)  # or measure_difficulty(...)"
# Maximum number of chunks that are submitted per worker.
_AHEAD = 4


# `(start, stop)`, the examples `start <= index < stop`.
Span: TypeAlias = tuple[int, int]
_Measure: TypeAlias = Callable[[int, int], Any]


def chunks(start: int, stop: int) -> list[Span]:
    """Returns the spans that are measured as one unit, in order."""
    return [(x, min(x + _CHUNK, stop)) for x in range(start, stop, _CHUNK)]


class WorkerDied(RuntimeError):
    """A worker process died while it measured examples."""


@dataclasses.dataclass(frozen=True)
class Workers:
    """Processes that measure examples.

    Attributes:
      count: number of worker processes; 0 measures in this process.
      progress: whether to show a progress bar on a terminal.

    Raises:
      ValueError: if `count` is not an integer from 0.
    """

    count: int
    progress: bool

    def __post_init__(self):
        count = check_integer("num_workers", self.count)
        if count < 0:
            raise ValueError(f"`num_workers={count}` must not be negative.")
        object.__setattr__(self, "count", count)

    def map(
        self, measure: _Measure, spans: list[Span], size: int, title: str
    ) -> Iterator[tuple[Span, Any]]:
        """Yields each span and its result as soon as it is measured, in any order.

        Args:
          measure: function from `(start, stop)` to the result of these examples.
          spans: the spans to measure.
          size: number of examples, including those that were measured before.
          title: title of the progress bar.

        Raises:
          RuntimeError: if a worker process dies, or the main script has no
            `if __name__ == "__main__":` guard.
        """
        with progress_bar(self.progress) as bar:
            task = bar.add_task(title, total=size)
            bar.advance(task, size - sum(stop - start for start, stop in spans))
            results = (
                _in_workers(measure, spans, self.count)
                if self.count
                else ((span, measure(*span)) for span in spans)
            )
            for (start, stop), result in results:
                yield (start, stop), result
                bar.advance(task, stop - start)


def _in_workers(
    measure: _Measure, spans: list[Span], num_workers: int
) -> Iterator[tuple[Span, Any]]:
    """Yields each span and its values as soon as they are measured."""
    exit_if_importing()
    task = _dump(measure)
    # Spawned, because forking a process with jax threads can deadlock.
    pool = ProcessPoolExecutor(num_workers, get_context("spawn"), _init_worker, (task,))
    pending = iter(spans)
    running: dict[Future[Any], Span] = {}
    workers: list[BaseProcess] = []
    try:
        while True:
            for span in itertools.islice(pending, _AHEAD * num_workers - len(running)):
                running[pool.submit(_measure_span, span)] = span
            if not running:
                return
            workers = workers or active_children()
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield running.pop(future), future.result()
    except BrokenProcessPool:
        # Exit codes can be read reliably only after the pool is shut down, because
        # its own thread reads them, too.
        pool.shutdown()
        if any(worker.exitcode == MISSING_GUARD for worker in workers):
            raise RuntimeError(missing_guard_message("measure_lengths(...)")) from None
        raise WorkerDied(
            "A worker process died, possibly for lack of memory. Run again; with "
            "`cache`, the examples that were already measured are not measured again."
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _dump(measure: _Measure) -> bytes:
    # cloudpickle, unlike pickle, handles functions of scripts and nested functions.
    try:
        return cloudpickle.dumps(measure)
    except Exception as error:
        raise ValueError(
            f"The source or the function cannot be sent to a worker: {error}. Pass "
            "picklable ones, or set `num_workers=0`."
        ) from error


_task: bytes


def _init_worker(task: bytes) -> None:
    global _task
    exit_with_parent()
    _task = task


def _measure_span(span: Span) -> Any:
    try:
        return _load(_task)(*span)
    except SystemExit as error:
        # If the parent raised SystemExit again, the caller would exit.
        raise RuntimeError(
            f"The source or the function exited a worker: SystemExit({error.code!r})."
        ) from None


@functools.cache
def _load(task: bytes) -> _Measure:
    try:
        return cloudpickle.loads(task)
    except Exception as error:
        raise ValueError(
            f"`source` cannot be opened in a worker: {type(error).__name__}: {error}. "
            "Pass a source that can be unpickled, or set `num_workers=0`."
        ) from error
