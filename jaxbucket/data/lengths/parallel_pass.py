"""One pass over a source in chunks: here, or in worker processes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context
from multiprocessing.process import BaseProcess

import cloudpickle
import numpy as np

from jaxbucket.base.progress import progress_bar
from jaxbucket.data.worker_exit import (
    UNGUARDED,
    end_if_importing,
    end_with_parent,
    unguarded,
)

# Examples that are measured together; what a kill may lose.
_CHUNK = 1024
_AHEAD = 4


def fill(
    found: np.ndarray,
    first: int,
    measure: Callable[[int, int], np.ndarray],
    num_workers: int,
    progress: bool,
    title: str,
) -> None:
    """Measures what is missing in `found`, whose first entry is example `first`."""
    starts = range(0, len(found), _CHUNK)
    missing = [s for s in starts if _is_missing(found[s : s + _CHUNK]).any()]
    spans = [(first + s, first + min(s + _CHUNK, len(found))) for s in missing]
    run = _in_workers if num_workers else _here
    with progress_bar(progress) as bar:
        task = bar.add_task(title, total=len(found))
        bar.advance(task, len(found) - sum(stop - start for start, stop in spans))
        for (start, stop), lengths in run(measure, spans, num_workers):
            found[start - first : stop - first] = lengths
            bar.advance(task, stop - start)


def _is_missing(found: np.ndarray) -> np.ndarray:
    return np.isnan(found) if found.dtype.kind == "f" else found == 0


_Span = tuple[int, int]


def _here(
    measure: Callable[[int, int], np.ndarray], spans: list[_Span], num_workers: int
) -> Iterator[tuple[_Span, np.ndarray]]:
    return ((span, measure(*span)) for span in spans)


def _in_workers(
    measure: Callable[[int, int], np.ndarray], spans: list[_Span], num_workers: int
) -> Iterator[tuple[_Span, np.ndarray]]:
    """Yields each as soon as it is there; a few for each worker are under way."""
    end_if_importing()
    task = _dumped(measure)
    # jax has threads, and a fork of these would hang.
    pool = ProcessPoolExecutor(num_workers, get_context("spawn"), _begin, (task,))
    left = iter(spans)
    running: dict[Future[np.ndarray], _Span] = {}
    workers: list[BaseProcess] = []
    try:
        while True:
            while len(running) < _AHEAD * num_workers and (span := next(left, None)):
                running[pool.submit(_span_of_worker, span)] = span
            if not running:
                return
            workers = workers or active_children()
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield running.pop(future), future.result()
    except BrokenProcessPool:
        # Until then, another thread may be about to read how they ended.
        pool.shutdown()
        if any(worker.exitcode == UNGUARDED for worker in workers):
            raise RuntimeError(unguarded("measure_lengths(...)")) from None
        raise RuntimeError(
            "A worker that measured was lost: killed, perhaps for want of memory. With "
            "`cache` what was measured is kept: run it again."
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _dumped(measure: Callable[[int, int], np.ndarray]) -> bytes:
    # By cloudpickle, for then functions of a script or of another function can be, too.
    try:
        return cloudpickle.dumps(measure)
    except Exception as error:
        raise ValueError(
            f"The source or the function cannot be sent to a worker: {error}. Give "
            "some that can be pickled, or `num_workers=0`."
        ) from error


_task: bytes


def _begin(task: bytes) -> None:
    global _task
    end_with_parent()
    _task = task


def _span_of_worker(span: _Span) -> np.ndarray:
    try:
        return _loaded(_task)(*span)
    except SystemExit as error:
        # It would end the caller.
        raise RuntimeError(
            f"The source or the function ended a worker: SystemExit({error.code!r})."
        ) from None


@functools.cache
def _loaded(task: bytes) -> Callable[[int, int], np.ndarray]:
    try:
        return cloudpickle.loads(task)
    except Exception as error:
        raise ValueError(
            f"`source` cannot be opened in a worker: {type(error).__name__}: {error}. "
            "Give one that can, or `num_workers=0`."
        ) from error
