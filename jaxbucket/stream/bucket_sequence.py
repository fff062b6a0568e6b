"""Which bucket every step of a stream has, where several hosts must agree on it.

It is a pure function of the plan, a sample of lengths, the seed and the number of the
step, so that no host asks another, and none waits.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.permutation import fold
from jaxbucket.packing.rows import pack

_WORD = 2**64
# 2**64 over the golden ratio: of all steps around a circle it leaves the evenest gaps.
_GOLDEN = 0x9E3779B97F4A7C15
# Of steps, at least so many are of the longest bucket, which any example fits in.
LEAST_OF_LONGEST = Fraction(1, 32)


class BucketSequence:
    """Index -> bucket, each as often as its share, and evenly spaced.

    Index i stands at `i / golden ratio` around a circle, of which every bucket has an
    arc as long as its share. So a bucket is never away for more than `longest_gap`.

    Example:
      >>> sequence = BucketSequence([Fraction(1, 2), Fraction(1, 4), Fraction(1, 4)])
      >>> [sequence[index] for index in range(8)]
      [0, 1, 0, 2, 0, 0, 1, 0]

    Args:
      shares: `[K]`, of all steps, that each bucket has.
      seed: where on the circle it begins.
    """

    def __init__(self, shares: Sequence[Fraction], seed: int = 0):
        self.shares = tuple(Fraction(share) for share in shares)
        ends = itertools.accumulate(self.shares)
        self._ends = [math.floor(end * _WORD) for end in ends]
        self._ends[-1] = _WORD
        self._start = fold(seed) if seed else 0
        self._above: dict[int, BucketSequence] = {}

    def __getitem__(self, index: int) -> int:
        return bisect.bisect_right(self._ends, (self._start + index * _GOLDEN) % _WORD)

    def above(self, bucket: int) -> BucketSequence:
        """Returns a sequence of the longer buckets alone, in the same proportions."""
        if bucket < 0:
            return self
        if bucket not in self._above:
            left = sum(self.shares[bucket + 1 :])
            shares = [x / left if k > bucket else 0 for k, x in enumerate(self.shares)]
            self._above[bucket] = BucketSequence([Fraction(x) for x in shares])
            self._above[bucket]._start = self._start
        return self._above[bucket]

    def longest_gap(self, bucket: int) -> int:
        """Returns in how many steps a bucket comes at least once."""
        # Where n points leave no gap larger than the arc, one of them is in it: of
        # steps by the golden ratio n gaps are at most 1 + 2 / sqrt(5) of the circle.
        return math.ceil(2 / self.shares[bucket])


def bucket_shares(
    plan: BucketPlan, lengths: np.ndarray, max_segments_per_row: int | None, packs: bool
) -> list[Fraction]:
    """Returns of all steps the share that each bucket has, exact.

    Args:
      plan: the shapes.
      lengths: `[N]` integers, a sample: of rows' examples, chunks for examples.
      max_segments_per_row: as in `pack`.
      packs: whether rows are packed.
    """
    kept = plan.kept(lengths)
    if packs:
        kept = pack(
            kept, plan.boundaries.tolist(), max_segments_per_row=max_segments_per_row
        ).row_lengths
    rows = np.bincount(plan.assign(kept), minlength=len(plan)).tolist()
    batches = [
        # One that the sample has nothing for is not forgotten.
        Fraction(max(count, 1), bucket.batch_size)
        for count, bucket in zip(rows, plan.buckets, strict=True)
    ]
    total = sum(batches)
    shares = [number / total for number in batches]
    if shares[-1] < LEAST_OF_LONGEST:
        others = 1 - shares[-1]
        scale = (1 - LEAST_OF_LONGEST) / others
        shares = [*(share * scale for share in shares[:-1]), LEAST_OF_LONGEST]
    return shares
