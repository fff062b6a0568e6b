"""The batches that drain the pools of all processes once all streams have ended."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.plan.flow.dominance import dominates
from jaxbucket.plan.flow.remainder import epoch_flow


def cheapest_batches(
    plan: BucketPlan,
    needed: Sequence[Sequence[int]],
    num_parts: Sequence[int],
    batch_sizes: Sequence[int] | np.ndarray,
) -> list[int]:
    """Returns the `[K]` numbers of batches that hold all pending examples.

    Only remainders move to a longer bucket, if that costs less. The batches are meant
    to be served from the longest bucket on.

    Example: 3 of the 5 short rows fill the batch of the longer bucket.
      >>> plan = BucketPlan.from_shapes([(2, 4), (4, 8)])
      >>> cheapest_batches(plan, [[5, 1]], [1], plan.batch_sizes)
      [1, 1]

    Args:
      plan: the shapes.
      needed: `[P, K]`, the rows that each process needs in each bucket.
      num_parts: `[P]`, the number of parts of the batch that each process has.
      batch_sizes: `[K]`, the rows of a part in a batch of each bucket.
    """
    orders, sizes = fill_order(plan), np.asarray(batch_sizes).tolist()

    def left_by(batches: Sequence[int]) -> list[list[int]]:
        """Returns the `[P, K]` examples that are in none of the batches."""
        left = [list(rows) for rows in needed]
        for k in reversed(range(len(plan))):
            for process, parts in zip(left, num_parts, strict=True):
                fill(process, orders[k], batches[k] * sizes[k] * parts)
        return left

    rows = rows_of_part(needed, num_parts, orders)
    batches = epoch_flow(plan, rows, sizes, plan.costs).batches.tolist()
    # With several sequences, examples may take the rows that were meant for others.
    # These then get batches of their own bucket.
    left = list(zip(left_by(batches), num_parts, strict=True))
    for k, size in enumerate(sizes):
        batches[k] += max(-(-process[k] // (size * parts)) for process, parts in left)
    for k in reversed(range(len(plan))):
        # Shorter examples fill the empty rows of longer batches, so the batches that
        # were meant for them may not be needed.
        while batches[k]:
            fewer = [*batches[:k], batches[k] - 1, *batches[k + 1 :]]
            if any(map(any, left_by(fewer))):
                break
            batches = fewer
    return batches


def rows_of_part(
    needed: Sequence[Sequence[int]],
    num_parts: Sequence[int],
    orders: Sequence[Sequence[int]],
) -> list[int]:
    """Returns the `[K]` rows that hold the pending examples of any single process.

    They are the rows of one part of the batch. From the longest bucket on, every
    process fills its rows of a bucket also with shorter examples.

    Example: one process needs 3 short rows, another one short and one long row.
      >>> rows_of_part([[3, 0], [1, 1]], num_parts=[1, 1], orders=[[0], [1, 0]])
      [2, 1]

    Args:
      needed, num_parts: as for `cheapest_batches`.
      orders: the buckets whose examples fill the rows of each bucket, in order.
    """
    left = [list(rows) for rows in needed]
    pairs = list(zip(left, num_parts, strict=True))
    rows = [0] * len(orders)
    for k in reversed(range(len(orders))):
        rows[k] = max(-(-process[k] // parts) for process, parts in pairs)
        for process, parts in pairs:
            fill(process, orders[k], rows[k] * parts)
    return rows


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
