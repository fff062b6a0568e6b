"""A planned beginning: the buckets of the first steps, in an order that is given.

It takes the first batches of the buckets it names, and the other batches of the first
epoch follow in the epoch's own order. So that epoch has the same examples, each once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np

from jaxbucket.base.buckets import Bucket, BucketPlan
from jaxbucket.base.checks import check_positive

Opening: TypeAlias = Literal["largest_first"] | Sequence[tuple[Bucket, int]]


class OpeningSteps:
    """Which batches are the first ones, and which ones are left.

    They are numbered by bucket, all those of the first bucket first.

    Args:
      plan: the buckets.
      batches: `[K]`, how many batches each has in an epoch.
      opening: pairs of a bucket and a number of steps, in their order;
        "largest_first" for one batch of the bucket with the most tokens.
      batches_per_step: how many batches a step has.

    Attributes:
      batches: `[num_batches]` int64, those that are planned.
      num_batches: how many there are.
      pairs: the pairs, as `[[B, T, batches], ...]`, for a fingerprint.

    Raises:
      ValueError: if a bucket is not of the plan, or has not so many batches.
    """

    def __init__(
        self,
        plan: BucketPlan,
        batches: np.ndarray,
        opening: Opening,
        batches_per_step: int = 1,
    ):
        if opening == "largest_first":
            pairs, batches_per_step = [(_largest(plan, batches), 1)], 1
        else:
            pairs = _pairs(opening)
        taken = np.zeros(len(plan), np.int64)
        first_batch = np.cumsum(batches) - batches
        numbers = []
        for bucket, steps in pairs:
            index = _index(plan, bucket)
            start = first_batch[index] + taken[index]
            count = check_positive("steps", steps) * batches_per_step
            if count > int(batches[index] - taken[index]):
                steps = (int(taken[index]) + count) // batches_per_step
                raise ValueError(
                    f"`opening` takes {steps} steps of "
                    f"bucket {bucket}, which has {batches[index] // batches_per_step} "
                    "in an epoch. Take fewer."
                )
            taken[index] += count
            numbers.append(np.arange(start, start + count))
        self.pairs = [
            [b.batch_size, b.seq_len, int(steps) * batches_per_step]
            for b, steps in pairs
        ]
        self.batches = np.concatenate([np.empty(0, np.int64), *numbers])
        self.num_batches = len(self.batches)
        # The batches that are left, counted on, begin in each bucket behind these.
        self._skipped = np.cumsum(taken)
        self._left_before = first_batch - np.cumsum(taken) + taken

    def nth_left(self, number: np.ndarray) -> np.ndarray:
        """The batches that are number so and so of those that are left, `[n]`."""
        index = np.searchsorted(self._left_before, number, side="right") - 1
        return number + self._skipped[index]

    def before(self, order: np.ndarray) -> np.ndarray:
        """Its own batches, and all others as they are ordered, `[steps]`."""
        return np.concatenate([self.batches, order[~np.isin(order, self.batches)]])


def _largest(plan: BucketPlan, batches: np.ndarray) -> Bucket:
    """Of the buckets that have a batch, the one with the most tokens."""
    used = [b for b, n in zip(plan.buckets, batches, strict=True) if n]
    # Of equally many tokens, the longest rows cost the most.
    return max(used, key=lambda b: (b.num_tokens, b.seq_len))


def _pairs(opening: Opening) -> Sequence[tuple[Bucket, int]]:
    if isinstance(opening, str):
        raise ValueError(
            f"`opening={opening!r}`: choose 'largest_first', or give pairs of a "
            "bucket and a number of steps."
        )
    pairs = list(opening)
    for pair in pairs:
        if not isinstance(pair, Sequence) or len(pair) != 2:
            raise ValueError(
                f"`opening` holds {pair!r}: make it a pair of a bucket and a number of "
                "steps."
            )
    return pairs


def _index(plan: BucketPlan, bucket: Bucket) -> int:
    if bucket not in plan.buckets:
        raise ValueError(
            f"`opening` names {bucket}, which is no bucket of the plan: choose from "
            f"{', '.join(map(str, plan.buckets))}."
        )
    return plan.buckets.index(bucket)
