"""Measures how far batches separate short examples from long ones."""

from __future__ import annotations

import math

import numpy as np

# Lengths count as alike if their logarithms vary by much less than this.
_SIMILAR = math.log(1.25) ** 2


def separation(
    buckets: np.ndarray,
    logs: np.ndarray,
    tokens: np.ndarray,
    batch_sizes: np.ndarray,
    variance: float,
) -> float:
    """Returns the share of the variance of lengths that is between batches.

    This is the squared correlation ratio (Pearson, 1905) of the logarithms of lengths,
    weighted by tokens, for batches of random rows of a bucket. The variance also has a
    constant part, so that the share is small if all lengths are similar. It is nearly 1
    if every bucket has a different length, and nearly 0 if every batch has many rows
    that may have any length.

    Example:
      >>> logs, tokens = np.log([1, 1, 9, 9]), np.full(4, 9)
      >>> variance = logs.var()
      >>> alike = separation(np.array([0, 0, 1, 1]), logs, tokens, [1, 1], variance)
      >>> mixed = separation(np.array([0, 1, 0, 1]), logs, tokens, [8, 8], variance)
      >>> round(alike, 2), round(mixed, 2)
      (0.96, 0.12)

    Args:
      buckets: `[R]` integers, the index of the bucket of each kind of row.
      logs: `[R]`, the mean logarithm of the lengths in a row of this kind, over its
        tokens.
      tokens: `[R]`, the number of tokens in all rows of this kind.
      batch_sizes: `[K]` integers, the number of rows of a batch of each bucket.
      variance: the variance of the logarithms of all lengths, over tokens.
    """
    weights = tokens / tokens.sum()
    logs = logs - weights @ logs
    shares, sums, squares = (
        np.bincount(buckets, x, len(batch_sizes))
        for x in (weights, weights * logs, weights * logs**2)
    )
    means = sums / np.where(shares > 0, shares, 1)
    within = np.maximum(squares - shares * means**2, 0)
    between = shares * means**2 + within / np.asarray(batch_sizes)
    return float(between.sum() / (variance + _SIMILAR))


def log_variance(lengths: np.ndarray, counts: np.ndarray) -> float:
    """Returns the variance of the logarithms of `[V]` lengths over tokens.

    Args:
      lengths: `[V]` positive integers.
      counts: `[V]` integers, the number of examples of each length.
    """
    weights = lengths * (counts / float(lengths @ counts))
    logs = np.log(lengths)
    return float(weights @ np.square(logs - weights @ logs))
