"""Measures which share of the time of a loop passes while it waits for data."""

from __future__ import annotations

import collections
import time
from collections.abc import Iterator
from typing import TypeVar

_T = TypeVar("_T")


class Waiting:
    """The share of the time of the last steps for which their loop waited.

    Args:
      num_steps: the number of steps to measure.
    """

    def __init__(self, num_steps: int = 100):
        # The seconds of waiting for the batch of the next step, and of the whole step.
        self._steps: collections.deque[tuple[float, float]]
        self._steps = collections.deque(maxlen=num_steps)

    @property
    def share(self) -> float:
        """From 0 to 1; 0 before the second batch."""
        # A copy, because another thread may ask.
        steps = list(self._steps)
        in_all = sum(seconds for _, seconds in steps)
        return sum(seconds for seconds, _ in steps) / in_all if in_all else 0.0

    def during(self, batches: Iterator[_T]) -> Iterator[_T]:
        """Yields the batches of a loop, whose steps are measured."""
        last = None
        while True:
            start = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            now = time.perf_counter()
            if last is not None:
                self._steps.append((now - start, now - last))
            last = now
            yield batch
