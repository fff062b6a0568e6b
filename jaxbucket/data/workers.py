"""Loads batches ahead in threads and worker processes, always in the same order."""

from __future__ import annotations

import collections
import copy
import functools
import os
import pickle
import sys
import threading
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import parent_process
from typing import Any, TypeVar

import grain
from absl import flags

from jaxbucket.base.checks import check_integer, check_type

_T = TypeVar("_T")
_END = object()
_WORKER_DIED = "terminated unexpectedly"


def load_in_workers(
    dataset: grain.MapDataset[_T],
    num_workers: int = 2,
    *,
    num_threads: int = 4,
    buffer_size: int = 2,
) -> Iterator[_T]:
    """Yields the elements of a dataset in order, loaded ahead of use.

    The workers start when the first element is requested, and exit when the iterator
    is closed. They import the main script, so the code that the script runs must be
    under `if __name__ == "__main__":`.

    Example:
      >>> import grain
      >>> squares = grain.MapDataset.range(5).map(lambda x: x * x)
      >>> list(load_in_workers(squares, num_workers=0))
      [0, 1, 4, 9, 16]

    Args:
      dataset: dataset from `batch_dataset`, or any other `grain.MapDataset`.
      num_workers: number of worker processes; 0 loads in threads of this process only.
        The dataset is pickled and sent to each worker.
      num_threads: number of threads per process that read elements.
      buffer_size: number of finished elements that each process keeps ready, in
        addition to those its threads are reading.

    Returns:
      An iterator over the elements.

    Raises:
      ValueError: if `num_workers` is negative, or `dataset` is no `grain.MapDataset`.
      RuntimeError: if a worker process dies.
    """
    remedy = "Pass the result of `batch_dataset`, or `grain.MapDataset.source(...)`."
    check_type("dataset", dataset, grain.MapDataset, remedy)
    elements = worker_dataset(dataset, num_workers, num_threads, buffer_size)
    # Copied, because the shared memory of workers is limited.
    return iterate(elements.map(copy.deepcopy) if num_workers else elements)


def worker_dataset(
    dataset: grain.MapDataset[_T], num_workers: int, num_threads: int, buffer_size: int
) -> grain.IterDataset[_T]:
    """Returns the elements of `load_in_workers`, in memory that workers share."""
    check_integer("num_workers", num_workers, least=0)
    # Grain warns if there are more threads than buffered elements.
    reading = grain.ReadOptions(
        num_threads=num_threads, prefetch_buffer_size=max(num_threads, buffer_size)
    )
    if num_workers:
        read = functools.partial(_read, dataset)
        dataset = grain.MapDataset.range(len(dataset)).map(read)
    # Without the states of a `BatchDataset`, because iterators here have none.
    elements = grain.MapDataset.to_iter_dataset(dataset, reading)
    if not num_workers:
        return elements
    # Grain reads absl flags, which are not parsed outside of absl programs.
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    return elements.mp_prefetch(
        grain.MultiprocessingOptions(num_workers, max(1, buffer_size)),
        worker_init_fn=_init_worker,
    )


def iterate(elements: grain.IterDataset[_T]) -> Generator[_T]:
    """Yields elements. If a worker dies, the error has a remedy."""
    iterator, is_exiting = iter(elements), sys.is_finalizing
    number = 0
    try:
        for element in iterator:
            number += 1
            yield element
    except RuntimeError as error:
        if _WORKER_DIED not in str(error):
            raise
        raise RuntimeError(
            f"A worker process died before element {number}: for lack of memory, or "
            "because the main script, which workers import, has no "
            '`if __name__ == "__main__":` guard. Use fewer workers, or add the guard.'
        ) from error
    finally:
        # When the interpreter exits, modules may be gone. Workers exit by themselves.
        if not is_exiting():
            iterator.close()


def in_thread(items: Generator[_T], size: int) -> Iterator[_T]:
    """Yields the items, while a thread makes `size` further ones.

    Unlike a thread of Grain, it passes on every error, keeps nobody waiting who closes
    the iterator, and ends before the interpreter does.
    """
    is_exiting = sys.is_finalizing
    pool = ThreadPoolExecutor(1, thread_name_prefix="jaxbucket-loader")
    ahead: collections.deque[Future[Any]] = collections.deque()
    try:
        for _ in range(size):
            ahead.append(pool.submit(next, items, _END))
        while (item := ahead.popleft().result()) is not _END:
            ahead.append(pool.submit(next, items, _END))
            yield item
    finally:
        # The last thread with a reference to the items closes them. It is not told to,
        # because where garbage collection closes this, a lock of `submit` may be taken.
        # When the interpreter exits, the thread has ended.
        if not is_exiting():
            pool.shutdown(wait=False, cancel_futures=True)


def _read(dataset: grain.MapDataset[Any], index: int) -> Any:
    """Returns an element, in a worker."""
    try:
        return dataset[index]
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            lines = [
                f"{type(error).__name__}: {error}",
                *getattr(error, "__notes__", ()),
            ]
            raise RuntimeError("\n".join(lines)) from None
        raise


def _init_worker(index: int, count: int) -> None:
    """Makes this worker exit when its parent process exits, even if it is busy."""
    del index, count
    threading.Thread(target=_exit_after_parent, daemon=True).start()


def _exit_after_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
