"""The rows of an epoch: what fills each batch of each bucket.

Rows are numbered within a bucket, all its batches end to end, and batches over all
buckets, those of the first bucket first. How many there are is the same in every
epoch; which example is in a row may differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.plan.remainder import Remainder, flow_remainders
from jaxbucket.schedule.grouping import Within, examples_by_bucket

# (bucket, `[n]` rows, how many there are) -> `[n]` slots, a permutation of them.
Slots: TypeAlias = Callable[[int, np.ndarray, int], np.ndarray]


class EpochRows:
    """Which examples are in which rows.

    A bucket has a slot for each of its own examples, and behind them one for each row
    that the bucket below hands on. Rows are slots, in order or permuted.

    Args:
      plan: the buckets.
      lengths: `[N]` integers that the plan takes.
      remainder: what becomes of examples that fill no batch.
      within: how the examples of a bucket are sorted.
      group: how many batches of one bucket belong together, and count as one here.

    Attributes:
      plan: the same.
      sizes: `[K]` int64, rows of a full batch.
      flow: how many rows and batches every bucket has.
      num_batches: batches of one epoch.

    Raises:
      ValueError: if no example is left, or an unknown remainder.
    """

    def __init__(
        self,
        plan: BucketPlan,
        lengths: np.ndarray,
        *,
        remainder: Remainder = "cheapest",
        within: Within | ArrayLike = "source",
        group: int = 1,
    ):
        self.plan = plan
        self.sizes = plan.rows_together(group)
        self._examples, counts = examples_by_bucket(plan, lengths, within)
        self._offsets = np.cumsum(counts) - counts
        self.flow = flow_remainders(counts, self.sizes, plan.costs, remainder)
        self.num_batches = self.flow.num_batches
        self._first_batch = np.cumsum(self.flow.batches) - self.flow.batches
        self._check_not_empty()

    def _check_not_empty(self) -> None:
        if not self.flow.counts.any():
            raise ValueError(
                "`overlong='drop'` leaves out every example: all are longer than "
                f"`seq_len={self.plan.max_seq_len}`. Plan with a larger `max_seq_len`."
            )
        if not self.num_batches:
            raise ValueError(
                "`remainder='drop'` leaves out every example: none of the buckets "
                f"{', '.join(map(str, self.plan.buckets))} is filled once. Keep "
                "remainders, or plan with a smaller `max_tokens`."
            )

    def bucket_of(self, batch: int | np.ndarray) -> np.ndarray:
        """Returns the bucket of each batch, as an index into the plan's."""
        return np.searchsorted(self._first_batch, batch, side="right") - 1

    def of_batch(self, batch: int) -> tuple[int, np.ndarray]:
        """Returns a batch's bucket, and the numbers of the rows that are filled."""
        bucket = int(self.bucket_of(batch))
        first = (batch - int(self._first_batch[bucket])) * int(self.sizes[bucket])
        last = min(first + int(self.sizes[bucket]), int(self.flow.rows[bucket]))
        return bucket, np.arange(first, last)

    def own(self, bucket: int) -> np.ndarray:
        """Returns the examples whose shortest bucket this is, as they are sorted."""
        first = int(self._offsets[bucket])
        return self._examples[first : first + int(self.flow.counts[bucket])]

    def examples(
        self, bucket: int, row: np.ndarray, slots: Slots | None = None
    ) -> np.ndarray:
        """Returns the `[n]` int64 examples in the `[n]` rows of a bucket."""
        examples = np.empty(len(row), np.int64)
        missing = np.arange(len(row))
        while True:
            own = int(self.flow.counts[bucket])
            slot = row
            if slots is not None:
                slot = slots(bucket, row, own + int(self.flow.carried[bucket]))
            here = slot < own
            found = self._offsets[bucket] + slot[here]
            examples[missing[here]] = self._examples[found]
            if here.all():
                return examples
            # Slots beyond the bucket's own are the rows that the one below left over.
            bucket -= 1
            missing = missing[~here]
            row = slot[~here] - own + int(self.flow.rows[bucket])
