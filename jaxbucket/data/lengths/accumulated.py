"""Metrics of an example that depend on counts over the whole data set."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxbucket.base.checks import MAX_LENGTH, check_function, check_positive


@dataclasses.dataclass(frozen=True)
class AccumulatedMetric:
    """A metric that needs counts over all examples before it can score one of them.

    `measure_difficulty` reads the source twice: once to add up the counts of all
    examples, and once to score each example. The sum is exact, so scores do not depend
    on the number of workers or processes.

    Example: the share of all examples that have the same label.
      >>> import jaxbucket as jb
      >>> metric = AccumulatedMetric(
      ...     count_fn=lambda x: ([x["label"]], [1]),
      ...     score_fn=lambda x, total: total[x["label"]] / total.sum(),
      ...     size=10,
      ... )
      >>> source = [{"label": 3}, {"label": 7}, {"label": 3}, {"label": 3}]
      >>> jb.data.measure_difficulty(source, metric, progress=False)
      array([0.75, 0.25, 0.75, 0.75], dtype=float32)

    Attributes:
      count_fn: function from an example to the counts that are added up: integers
        `[size]` from 0 to 2**31 - 1; or a tuple (ids `[n]`, counts `[n]`), where id i
        stands for entry i of the sum, and may be repeated.
      score_fn: function from an example and the sum, `[size]` int64 and read-only, to a
        finite number.
      size: the number of entries of the sum, such as that of a vocabulary.

    Raises:
      ValueError: if a function is not callable, or `size` is not a positive integer.
    """

    count_fn: Callable[[Any], Any]
    score_fn: Callable[[Any, np.ndarray], float]
    size: int

    def __post_init__(self):
        of = {"count_fn": "an example", "score_fn": "an example and the sum"}
        for name, arguments in of.items():
            check_function(name, getattr(self, name), arguments)
        object.__setattr__(self, "size", check_positive("size", self.size))

    def __call__(self, example: Any, total: np.ndarray) -> float:
        """Returns the score of an example, given the sum over all examples."""
        return self.score_fn(example, total)

    def add_counts(self, total: np.ndarray, example: Any) -> None:
        """Adds the counts of an example to `total`, `[size]` int64.

        Raises:
          ValueError: if `count_fn` returns anything but valid counts.
        """
        returned = self.count_fn(example)
        if not isinstance(returned, tuple):
            total += self._checked(returned, (self.size,))
            return
        if len(returned) != 2:
            raise ValueError(
                f"`count_fn` returned a tuple of {len(returned)}. Return (ids, counts)."
            )
        ids = np.asarray(returned[0])
        counts = self._checked(returned[1], (ids.size,))
        if not ids.size:
            return
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ValueError(
                f"`count_fn` returned ids of {ids.dtype}{list(ids.shape)}. Return "
                "integers [n]."
            )
        if (outside := (ids < 0) | (ids >= self.size)).any():
            raise ValueError(
                f"`count_fn` returned the id {ids[outside][0]}, which is not from 0 to "
                f"{self.size - 1}. Fix the function, or increase `size={self.size}`."
            )
        np.add.at(total, ids, counts)

    def _checked(self, counts: Any, shape: tuple[int, ...]) -> np.ndarray:
        """Returns counts as int64, or raises a ValueError."""
        array = np.asarray(counts)
        if array.shape != shape or (array.size and array.dtype.kind not in "biu"):
            raise ValueError(
                f"`count_fn` returned counts of {array.dtype}{list(array.shape)}. "
                f"Return integers {list(shape)}, or a tuple (ids, counts)."
            )
        if array.size and not 0 <= array.min() <= array.max() <= MAX_LENGTH:
            raise ValueError(
                f"`count_fn` returned counts from {array.min()} to {array.max()}. "
                f"Return integers from 0 to {MAX_LENGTH}."
            )
        return array.astype(np.int64)
