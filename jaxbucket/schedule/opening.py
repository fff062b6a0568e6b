"""Openings, which fix the buckets of the first steps.

An opening takes the first batches of the buckets that it names. The other batches of
the first epoch follow in the usual order. The first epoch therefore still contains
every example once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np

from jaxbucket.base.bucket import Bucket
from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.checks import check_positive

Opening: TypeAlias = Literal["largest_first"] | Sequence[tuple[Bucket, int]]


class OpeningSteps:
    """The batches of an opening, and the batches that remain for the rest of the epoch.

    Batches are numbered by bucket: first all batches of the first bucket, and so on.

    Args:
      plan: the buckets.
      batches: `[K]` integers, the number of batches of each bucket in an epoch.
      opening: pairs of a bucket and a number of steps, in order, or "largest_first" for
        one batch of the bucket with the most tokens.
      batches_per_step: the number of batches in a step.

    Attributes:
      batches: `[num_batches]` int64, the numbers of the batches of the opening.
      num_batches: the number of batches of the opening.
      taken: `[K]` int64, the number of batches of the opening in each bucket.
      entries: the opening as `[[B, T, num_batches], ...]`, for fingerprints.

    Raises:
      ValueError: if `opening` is an unknown string or not a list of pairs, if a number
        of steps is not positive, or if a bucket is not in the plan or does not have
        enough batches.
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
        numbers, self.entries = [np.empty(0, np.int64)], []
        for bucket, steps in pairs:
            index = _index(plan, bucket)
            start = first_batch[index] + taken[index]
            count = check_positive("steps", steps) * batches_per_step
            if count > int(batches[index] - taken[index]):
                steps = (int(taken[index]) + count) // batches_per_step
                raise ValueError(
                    f"`opening` takes {steps} steps of bucket {bucket}, which has only "
                    f"{batches[index] // batches_per_step} in an epoch. Take fewer "
                    "steps."
                )
            taken[index] += count
            numbers.append(np.arange(start, start + count))
            self.entries.append([*bucket.to_list(), count])
        self.taken = taken
        self.batches = np.concatenate(numbers)
        self.num_batches = len(self.batches)
        # For each bucket: opening batches in it and in earlier buckets; remaining
        # batches in earlier buckets.
        self._skipped = np.cumsum(taken)
        self._first_remaining = first_batch - self._skipped + taken

    def nth_remaining(self, number: np.ndarray) -> np.ndarray:
        """Returns the batches at `[n]` indices among the batches that remain."""
        index = np.searchsorted(self._first_remaining, number, side="right") - 1
        return number + self._skipped[index]

    def prepend_to(self, order: np.ndarray) -> np.ndarray:
        """Returns the batches of the opening, followed by the others as in `order`."""
        return np.concatenate([self.batches, order[~np.isin(order, self.batches)]])


def _largest(plan: BucketPlan, batches: np.ndarray) -> Bucket:
    """Returns the bucket with the most tokens among those that have a batch."""
    used = [b for b, n in zip(plan.buckets, batches, strict=True) if n]
    # For equal numbers of tokens, the longest rows cost the most.
    return max(used, key=lambda b: (b.num_tokens, b.seq_len))


def _pairs(opening: Opening) -> Sequence[tuple[Bucket, int]]:
    if isinstance(opening, str):
        raise ValueError(
            f"`opening={opening!r}` is unknown. Pass 'largest_first', or pairs of a "
            "bucket and a number of steps."
        )
    pairs = list(opening)
    for pair in pairs:
        if not isinstance(pair, Sequence) or len(pair) != 2:
            raise ValueError(
                f"`opening` contains {pair!r}, which is not a pair. Pass pairs of a "
                "bucket and a number of steps."
            )
    return pairs


def _index(plan: BucketPlan, bucket: Bucket) -> int:
    if bucket not in plan.buckets:
        raise ValueError(
            f"`opening` names {bucket}, which is not a bucket of the plan. Choose from "
            f"{', '.join(map(str, plan.buckets))}."
        )
    return plan.buckets.index(bucket)
