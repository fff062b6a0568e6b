"""A planned beginning: the buckets of the first steps, in an order that is given.

It takes the first batches of the buckets it names, and the other batches of the first
epoch follow in the epoch's own order. So that epoch has the same examples, each once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np

from jaxbucket.base import Bucket, BucketPlan
from jaxbucket.checks import check_positive

Opening: TypeAlias = Literal["largest_first"] | Sequence[tuple[Bucket, int]]


class OpeningSteps:
    """Which batch is at each of the first steps, and which ones are left.

    Batches are numbered by bucket: those of bucket k begin with `first_batch[k]`.

    Args:
      plan: the buckets.
      batches: `[K]`, how many batches each has in an epoch.
      opening: pairs of a bucket and a number of steps, in their order;
        "largest_first" for one step of the bucket with the most tokens.

    Attributes:
      steps: how many steps are planned.
      pairs: the pairs, as `[[B, T, steps], ...]`, for a fingerprint.

    Raises:
      ValueError: if a bucket is not of the plan, or has not so many batches.
    """

    def __init__(self, plan: BucketPlan, batches: np.ndarray, opening: Opening):
        pairs = _pairs(plan, batches, opening)
        taken = np.zeros(len(plan), np.int64)
        first_batch = np.cumsum(batches) - batches
        numbers = []
        for bucket, steps in pairs:
            index = _index(plan, bucket)
            start = first_batch[index] + taken[index]
            taken[index] += check_positive("steps", steps)
            if taken[index] > batches[index]:
                raise ValueError(
                    f"`opening` takes {taken[index]} steps of bucket {bucket}, which "
                    f"has {batches[index]} in an epoch. Take fewer."
                )
            numbers.append(np.arange(start, start + steps))
        self.pairs = [[b.batch_size, b.seq_len, int(steps)] for b, steps in pairs]
        self._numbers = np.concatenate([np.empty(0, np.int64), *numbers])
        self.steps = len(self._numbers)
        # The batches that are left, counted on, begin in each bucket behind these.
        self._skipped = np.cumsum(taken)
        self._left_before = first_batch - np.cumsum(taken) + taken

    def batch_at(self, step: int) -> int:
        """The batch at one of the planned steps."""
        return int(self._numbers[step])

    def nth_left(self, number: int) -> int:
        """The batch that is number so and so of those that are left."""
        index = np.searchsorted(self._left_before, number, side="right") - 1
        return number + int(self._skipped[index])

    def before(self, order: np.ndarray) -> np.ndarray:
        """`[steps]`: its own batches, and all others as they are ordered."""
        return np.concatenate([self._numbers, order[~np.isin(order, self._numbers)]])


def _pairs(
    plan: BucketPlan, batches: np.ndarray, opening: Opening
) -> Sequence[tuple[Bucket, int]]:
    if isinstance(opening, str):
        if opening != "largest_first":
            raise ValueError(
                f"`opening={opening!r}`: choose 'largest_first', or give pairs of a "
                "bucket and a number of steps."
            )
        used = [b for b, n in zip(plan.buckets, batches, strict=True) if n]
        # Of equally many tokens, the longest rows cost the most.
        return [(max(used, key=lambda b: (b.num_tokens, b.seq_len)), 1)]
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
