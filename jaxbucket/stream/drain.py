"""The batches that drain the pools of all processes once all streams have ended."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.plan.flow.epoch import row_flow
from jaxbucket.stream.fill_order import fill, fill_order


def rows_of_part(
    plan: BucketPlan, needed: Sequence[Sequence[int]], num_parts: Sequence[int]
) -> list[int]:
    """Returns the `[K]` rows that hold the pending examples of any single process.

    They are the rows of one part of the batch. From the longest bucket on, every
    process fills its rows of a bucket also with shorter examples.

    Example: one process needs 3 short rows, another one short and one long row.
      >>> plan = BucketPlan.from_shapes([(2, 8), (1, 16)])
      >>> rows_of_part(plan, [[3, 0], [1, 1]], num_parts=[1, 1])
      [2, 1]

    Args:
      plan: the shapes.
      needed: `[P, K]`, the rows that each process needs in each bucket.
      num_parts: `[P]`, the number of parts of the batch that each process has.
    """
    orders = fill_order(plan)
    left = [list(rows) for rows in needed]
    pairs = list(zip(left, num_parts, strict=True))
    rows = [0] * len(plan)
    for k in reversed(range(len(plan))):
        rows[k] = max(-(-process[k] // parts) for process, parts in pairs)
        for process, parts in pairs:
            fill(process, orders[k], rows[k] * parts)
    return rows


def cheapest_batches(
    plan: BucketPlan, rows: Sequence[int], batch_sizes: Sequence[int] | np.ndarray
) -> list[int]:
    """Returns the `[K]` numbers of batches that hold all rows at the lowest cost.

    Remaining rows may move to a longer bucket.

    Example: 3 of the 5 short rows fill the batch of the longer bucket.
      >>> plan = BucketPlan.from_shapes([(2, 4), (4, 8)])
      >>> cheapest_batches(plan, [5, 1], plan.batch_sizes)
      [1, 1]

    Args:
      plan: the shapes.
      rows: `[K]`, the rows needed in each bucket.
      batch_sizes: `[K]`, the rows of a batch of each bucket.
    """
    orders, sizes = fill_order(plan), np.asarray(batch_sizes).tolist()

    def hold_all(batches: list[int]) -> bool:
        left = list(rows)
        for k in reversed(range(len(plan))):
            fill(left, orders[k], batches[k] * sizes[k])
        return not any(left)

    batches = row_flow(plan, rows, sizes, plan.costs).batches.tolist()
    for k in reversed(range(len(plan))):
        # Shorter examples fill the empty rows of longer batches, so the batches that
        # were meant for them may not be needed.
        while batches[k] and hold_all([n - (i == k) for i, n in enumerate(batches)]):
            batches[k] -= 1
    return batches
