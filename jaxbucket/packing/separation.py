"""Measures how far buckets separate short examples from long ones."""

from __future__ import annotations

import math

import numpy as np

# Lengths count as alike if their logarithms vary by much less than this.
_SIMILAR = math.log(1.25) ** 2


def separation(buckets: np.ndarray, lengths: np.ndarray, counts: np.ndarray) -> float:
    """Returns the share of the variance of lengths that is between buckets.

    This is the squared correlation ratio (Pearson, 1905) of the logarithms of lengths,
    weighted by tokens, except that the variance also has a constant part, so that it is
    small if all lengths are similar. It is 0 if the examples of every bucket have the
    same mean length, as in packed rows of a single T, and nearly 1 if every bucket has
    a different length.

    Example:
      >>> lengths, counts = np.array([1, 1, 9, 9]), np.array([9, 9, 1, 1])
      >>> separation(np.array([0, 1, 0, 1]), lengths, counts)
      0.0
      >>> round(separation(np.array([0, 0, 1, 1]), lengths, counts), 2)
      0.96
      >>> round(separation(np.array([0, 0, 1, 1]), lengths + 99, counts), 2)
      0.01

    Args:
      buckets: `[N]` integers, the index of the bucket of each kind of example.
      lengths: `[N]` positive integers, the length of each kind of example.
      counts: `[N]` integers, the number of examples of each kind.
    """
    weights = lengths * (counts / float(lengths @ counts))
    logs = np.log(lengths)
    logs -= weights @ logs
    shares, sums = (np.bincount(buckets, x) for x in (weights, weights * logs))
    between = np.square(sums) / np.where(shares > 0, shares, 1)
    return float(between.sum() / (weights @ np.square(logs) + _SIMILAR))
