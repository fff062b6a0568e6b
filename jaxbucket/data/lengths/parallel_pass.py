"""One pass over a source in chunks: here, or in worker processes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context
from multiprocessing.process import BaseProcess

import cloudpickle
import numpy as np

from jaxbucket.base.progress import progress_bar
from jaxbucket.data.lengths.cache import is_measured
from jaxbucket.data.worker_exit import (
    UNGUARDED,
    end_if_importing,
    end_with_parent,
    unguarded,
)

# Examples that are measured together; what a kill may lose.
_CHUNK = 1024
_AHEAD = 4


_Span = tuple[int, int]
_Measure = Callable[[int, int], np.ndarray]


def fill(
    values: np.ndarray,
    first: int,
    measure: _Measure,
    num_workers: int,
    progress: bool,
    title: str,
) -> None:
    """Measures what is missing in `values`.

    Args:
      values: `[n]` of some examples, 0 or NaN where one is missing; written to.
      first: the example that `values[0]` is of.
      measure: first example, the one after the last -> their values.
      num_workers: worker processes; 0 measures in this one.
      progress: show a progress bar on a terminal.
      title: of that bar.

    Raises:
      RuntimeError: if a worker is lost, or the script starts some in every worker.
    """
    chunks = [slice(s, s + _CHUNK) for s in range(0, len(values), _CHUNK)]
    missing = [chunk for chunk in chunks if not is_measured(values[chunk]).all()]
    spans = [(first + x.start, first + min(x.stop, len(values))) for x in missing]
    with progress_bar(progress) as bar:
        task = bar.add_task(title, total=len(values))
        bar.advance(task, len(values) - sum(stop - start for start, stop in spans))
        results = (
            _in_workers(measure, spans, num_workers)
            if num_workers
            else ((span, measure(*span)) for span in spans)
        )
        for (start, stop), measured in results:
            values[start - first : stop - first] = measured
            bar.advance(task, stop - start)


def _in_workers(
    measure: _Measure, spans: list[_Span], num_workers: int
) -> Iterator[tuple[_Span, np.ndarray]]:
    """Yields each as soon as it is there; a few for each worker are under way."""
    end_if_importing()
    task = _dumped(measure)
    # By spawn, because jax has threads, and a fork of these would hang.
    pool = ProcessPoolExecutor(num_workers, get_context("spawn"), _begin, (task,))
    pending = iter(spans)
    running: dict[Future[np.ndarray], _Span] = {}
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


def _dumped(measure: _Measure) -> bytes:
    # By cloudpickle, so that functions of a script or inside others can be sent, too.
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


def _measure_span(span: _Span) -> np.ndarray:
    try:
        return _loaded(_task)(*span)
    except SystemExit as error:
        # It would end the caller.
        raise RuntimeError(
            f"The source or the function ended a worker: SystemExit({error.code!r})."
        ) from None


@functools.cache
def _loaded(task: bytes) -> _Measure:
    try:
        return cloudpickle.loads(task)
    except Exception as error:
        raise ValueError(
            f"`source` cannot be opened in a worker: {type(error).__name__}: {error}. "
            "Give one that can, or `num_workers=0`."
        ) from error
