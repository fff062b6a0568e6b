"""The sequence of buckets of a stream that several processes read.

The bucket of a step is a pure function of the plan, a sample of lengths, the seed and
the step, so processes agree on it without communicating.
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
from jaxbucket.plan.flow.dominance import is_maximal

_WORD = 2**64
# 2**64 over the golden ratio: the step on a circle that spaces points most evenly.
_GOLDEN = 0x9E3779B97F4A7C15
# The smallest share of the longest bucket, the only one that any example fits in. With
# several sequences there may be several, which have equal parts of this share.
MIN_SHARE_OF_LONGEST = Fraction(1, 32)


class BucketSequence:
    """Maps an index to a bucket, such that buckets are evenly spaced.

    Index i is at `i / golden ratio` on a circle on which the arc of every bucket is as
    long as its share. So each bucket occurs in proportion to its share, and at least
    once in `2 / share` steps: after n steps of the golden ratio, gaps on the circle are
    at most `(1 + 2 / sqrt(5)) / n`, so one of the steps is in the arc.

    Example:
      >>> sequence = BucketSequence([Fraction(1, 2), Fraction(1, 4), Fraction(1, 4)])
      >>> [sequence[index] for index in range(8)]
      [0, 1, 0, 2, 0, 0, 1, 0]

    Args:
      shares: `[K]`, the share of steps of each bucket.
      seed: determines the position on the circle at which the sequence starts.
    """

    def __init__(self, shares: Sequence[Fraction], seed: int = 0):
        self.shares = tuple(Fraction(share) for share in shares)
        self._seed = seed
        ends = itertools.accumulate(self.shares)
        self._ends = [math.floor(end * _WORD) for end in ends]
        self._ends[-1] = _WORD
        self._start = fold(seed) if seed else 0
        self._longer: dict[int, BucketSequence] = {0: self}

    def __getitem__(self, index: int) -> int:
        return bisect.bisect_right(self._ends, (self._start + index * _GOLDEN) % _WORD)

    def without_shorter(self, min_bucket: int) -> BucketSequence:
        """Returns the sequence restricted to `min_bucket` and longer buckets.

        The ratios of their shares are unchanged.

        Example:
          >>> longer = BucketSequence([Fraction(1, 3)] * 3).without_shorter(1)
          >>> [longer[index] for index in range(6)]
          [1, 2, 1, 2, 1, 1]
        """
        if min_bucket not in self._longer:
            total = sum(self.shares[min_bucket:])
            shares = [share / total for share in self.shares[min_bucket:]]
            shares = [Fraction(0)] * min_bucket + shares
            self._longer[min_bucket] = BucketSequence(shares, self._seed)
        return self._longer[min_bucket]


def rows_by_bucket(
    plan: BucketPlan, lengths: np.ndarray, max_segments: int | None
) -> np.ndarray:
    """Returns the number of rows of each bucket that a sample fills, `[K]` integers.

    Args:
      plan: the shapes.
      lengths: `[N]` integers, the lengths of a sample of examples, or of their chunks
        if overlong examples are split; `[N, Q]` with several sequences.
      max_segments: the largest number of examples in a packed row; None without
        packing.
    """
    lengths = plan.kept_lengths(lengths)
    if not len(lengths):
        return np.zeros(len(plan), np.int64)
    if max_segments is not None:
        boundaries = plan.boundaries.tolist()
        lengths = pack(
            lengths, boundaries, max_segments_per_row=max_segments
        ).row_lengths
    return np.bincount(plan.assign(lengths), minlength=len(plan))


def bucket_shares(
    plan: BucketPlan, lengths: np.ndarray, max_segments: int | None
) -> list[Fraction]:
    """Returns the exact share of steps of each bucket.

    Args:
      plan, lengths, max_segments: as for `rows_by_bucket`.
    """
    rows = rows_by_bucket(plan, lengths, max_segments).tolist()
    batches = [
        # At least 1, so that a bucket without an example in the sample has a share.
        Fraction(max(count, 1), bucket.batch_size)
        for count, bucket in zip(rows, plan.buckets, strict=True)
    ]
    shares = [number / sum(batches) for number in batches]
    longest = np.flatnonzero(is_maximal(plan.seq_lens)).tolist()
    return _with_minimum(shares, longest, MIN_SHARE_OF_LONGEST / len(longest))


def _with_minimum(
    shares: list[Fraction], buckets: list[int], minimum: Fraction
) -> list[Fraction]:
    """Returns shares of which those of some buckets have a minimum.

    The ratios of all other shares are unchanged.

    Example:
      >>> shares = [Fraction(1, 2), Fraction(1, 2), Fraction(0)]
      >>> [str(x) for x in _with_minimum(shares, [2], Fraction(1, 5))]
      ['2/5', '2/5', '1/5']
    """
    raised: set[int] = set()
    while True:
        others = sum(x for k, x in enumerate(shares) if k not in raised)
        scale = (1 - minimum * len(raised)) / others
        scaled = [
            minimum if k in raised else share * scale for k, share in enumerate(shares)
        ]
        # Scaling may have moved further shares below the minimum.
        below = {k for k in buckets if scaled[k] < minimum}
        if not below:
            return scaled
        raised |= below
