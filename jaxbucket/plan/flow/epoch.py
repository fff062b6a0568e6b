"""The rows and batches of an epoch of a plan, of one or of several lengths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.plan.flow.dominance import dominates
from jaxbucket.plan.flow.remainder import Remainder, RowFlow, flow_remainders


def epoch_flow(
    plan: BucketPlan, counts: np.ndarray, remainder: Remainder, together: int = 1
) -> RowFlow:
    """Returns the rows and batches of an epoch.

    Args:
      plan: the buckets.
      counts: `[K]` integers, the number of examples that each bucket is assigned.
      remainder: the policy for examples that do not fill a batch.
      together: the number of batches of a bucket that are treated as one.

    Raises:
      ValueError: if the policy is unknown.
    """
    sizes = plan.rows_per_step(together)
    return row_flow(plan, counts, sizes, plan.costs, remainder)


def row_flow(
    plan: BucketPlan,
    counts: Sequence[int] | np.ndarray,
    batch_sizes: Sequence[int] | np.ndarray,
    costs: np.ndarray,
    remainder: Remainder = "cheapest",
) -> RowFlow:
    """Returns the rows and batches of examples, for batches of any size.

    Args:
      plan: the buckets.
      counts: `[K]` integers, the number of examples that each bucket is assigned.
      batch_sizes: `[K]` integers, the rows of a batch of each bucket.
      costs: `[K]` numbers, the cost of such a batch.
      remainder: the policy for examples that do not fill a batch.

    Raises:
      ValueError: if the policy is unknown.
    """
    above = dominates(plan.seq_lens) if plan.sequences else None
    return flow_remainders(counts, batch_sizes, costs, remainder, above)
