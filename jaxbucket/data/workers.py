"""Batches loaded ahead by threads and by processes: the same ones, however many."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import grain
import numpy as np
from absl import flags

from jaxbucket.base.checks import check_integer
from jaxbucket.data.worker_exit import (
    UNGUARDED,
    end_if_importing,
    end_with_parent,
    unguarded,
)

_T = TypeVar("_T")
_LOST = "terminated unexpectedly"


def load_in_workers(
    dataset: grain.MapDataset[_T],
    num_workers: int = 2,
    *,
    num_threads: int = 4,
    buffer_size: int = 2,
) -> Iterator[_T]:
    """Yields the elements of a dataset in order, loaded ahead.

    Workers are started with the first element, and ended with the iterator. A script
    has to keep what it runs behind `if __name__ == "__main__":`, for they import it.

    Example:
      >>> import grain
      >>> squares = grain.MapDataset.range(5).map(lambda x: x * x)
      >>> list(load_in_workers(squares, num_workers=0))
      [0, 1, 4, 9, 16]

    Args:
      dataset: of `batch_dataset`, or any other.
      num_workers: processes; 0 for none but this one. The dataset is sent to each.
      num_threads: of each process, which read elements.
      buffer_size: elements that each process has ready, beside those that its threads
        read.

    Raises:
      ValueError: if a number is negative, or `dataset` something else.
      RuntimeError: if a worker is lost, or the script has no such guard.
    """
    if not isinstance(dataset, grain.MapDataset):
        raise ValueError(
            f"`dataset` is a {type(dataset).__name__}, not a `grain.MapDataset`: pass "
            "what `batch_dataset` returned, or `grain.MapDataset.source(...)`."
        )
    for name, value in (
        ("num_workers", num_workers),
        ("num_threads", num_threads),
        ("buffer_size", buffer_size),
    ):
        if check_integer(name, value) < 0:
            raise ValueError(f"`{name}={value}` must not be negative.")
    return _load(dataset, num_workers, num_threads, buffer_size)


def _load(
    dataset: grain.MapDataset[_T], num_workers: int, num_threads: int, buffer_size: int
) -> Iterator[_T]:
    # Grain warns of threads that have no element of their own to read.
    reading = grain.ReadOptions(
        num_threads=num_threads, prefetch_buffer_size=max(num_threads, buffer_size)
    )
    elements = dataset.to_iter_dataset(reading)
    if num_workers:
        end_if_importing()
        # Grain reads flags of absl, which nobody has parsed outside its own programs.
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()
        elements = elements.mp_prefetch(
            grain.MultiprocessingOptions(num_workers, max(1, buffer_size)),
            worker_init_fn=_begin,
        )
    iterator = iter(elements)
    number = 0
    try:
        for element in iterator:
            number += 1
            yield _copied(element) if num_workers else element
    except RuntimeError as error:
        if _LOST not in str(error):
            raise
        if f"exit code {UNGUARDED}." in str(error):
            raise RuntimeError(
                unguarded("for batch in jb.data.load_in_workers(...):\n        ...")
            ) from None
        raise RuntimeError(
            f"A worker was lost before element {number}: killed, perhaps for want of "
            "memory. Nothing is wrong with the elements before: go on with "
            f"`start_step` {number} steps later, or resume from the last checkpoint."
        ) from error
    finally:
        iterator.close()


def _begin(index: int, count: int) -> None:
    del index, count
    end_with_parent()


def _copied(element: Any) -> Any:
    """The element out of the memory that Grain shares with a worker, which is small."""
    if isinstance(element, np.ndarray) and not isinstance(element, np.ma.MaskedArray):
        return np.array(element)
    if type(element) is dict:
        return {name: _copied(value) for name, value in element.items()}
    if isinstance(element, tuple) and hasattr(element, "_fields"):
        return type(element)(*map(_copied, element))
    if isinstance(element, list | tuple):
        return type(element)(map(_copied, element))
    return element
