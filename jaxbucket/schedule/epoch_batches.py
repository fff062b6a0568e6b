"""The batches of an epoch: how many each bucket has, and how many rows they hold.

Batches are numbered over all buckets, starting with those of the first bucket. All of
this follows from the number of examples in each bucket, so it is the same in every
epoch, and the examples themselves are not needed.
"""

from __future__ import annotations

import numpy as np

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.plan.flow.remainder import Remainder, epoch_flow


class EpochBatches:
    """Numbers the batches of an epoch.

    Args:
      plan: the buckets.
      counts: `[K]` integers, the number of examples that the plan assigns to each
        bucket.
      remainder: the policy for examples that do not fill a batch.
      group: the number of batches of a bucket that are treated as one batch here.
      batches_per_step: the number of batches in a step.

    Attributes:
      plan: the buckets.
      sizes: `[K]` int64, the rows of a full batch of each bucket.
      flow: the number of rows and batches of each bucket.
      num_batches: the number of batches in one epoch.
      batches_per_step: the number of batches in a step.
      steps_per_epoch: the number of steps in one epoch.

    Raises:
      ValueError: if no batch is left.
    """

    def __init__(
        self,
        plan: BucketPlan,
        counts: np.ndarray,
        *,
        remainder: Remainder = "cheapest",
        group: int = 1,
        batches_per_step: int = 1,
    ):
        self.plan = plan
        self.sizes = plan.batch_sizes * group
        self.flow = epoch_flow(plan, counts, self.sizes, plan.costs, remainder)
        self.num_batches = self.flow.num_batches
        self.batches_per_step = batches_per_step
        self.steps_per_epoch = -(-self.num_batches // batches_per_step)
        self._first_batch = np.cumsum(self.flow.batches) - self.flow.batches
        if not self.num_batches:
            raise ValueError(
                f"`overlong={plan.overlong!r}` and `remainder={remainder!r}` leave out "
                "every example: all are too long, or no bucket has a full batch. Plan "
                "with a larger `max_seq_len` or a smaller `max_tokens`."
            )

    def bucket_of(self, batch: int | np.ndarray) -> np.ndarray:
        """Returns the index of the bucket of each batch."""
        return np.searchsorted(self._first_batch, batch, side="right") - 1

    def batch_rows(self, batch: int) -> tuple[int, range]:
        """Returns the bucket of a batch, and the numbers of its non-empty rows.

        Rows are numbered within a bucket, through all of its batches.
        """
        bucket = int(self.bucket_of(batch))
        first = (batch - int(self._first_batch[bucket])) * int(self.sizes[bucket])
        last = min(first + int(self.sizes[bucket]), int(self.flow.rows[bucket]))
        return bucket, range(first, last)
