"""The order in which the examples of different buckets fill the rows of a bucket."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.plan.flow.dominance import dominates


def fill_order(plan: BucketPlan) -> list[list[int]]:
    """Returns the buckets whose examples fill the rows of each bucket, in order.

    A bucket is filled with its own examples first, then with those of the next shorter
    bucket that it dominates, and so on.

    Example:
      >>> sizes = [{"x": 4, "y": 2}, {"x": 2, "y": 4}, {"x": 4, "y": 4}]
      >>> fill_order(BucketPlan.from_shapes([(1, size) for size in sizes]))
      [[0], [1], [2, 1, 0]]
    """
    below = dominates(plan.seq_lens).T
    return [[k, *np.flatnonzero(below[k])[::-1].tolist()] for k in range(len(plan))]


def fill(left: list[int], order: Sequence[int], num_rows: int) -> None:
    """Removes the examples that fill rows of a bucket from those that are left.

    Example:
      >>> left = [4, 2, 1]
      >>> fill(left, [2, 1, 0], num_rows=5)
      >>> left
      [2, 0, 0]

    Args:
      left: `[K]`, the number of examples of each bucket, which is updated.
      order: the buckets whose examples fill the rows, from `fill_order`.
      num_rows: the number of rows.
    """
    for bucket in order:
        number = min(left[bucket], num_rows)
        left[bucket] -= number
        num_rows -= number
