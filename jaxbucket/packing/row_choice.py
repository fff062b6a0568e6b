"""`RowChoice`, the packed rows for one choice of their T, with the cost of an epoch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.packing.rows import Packing

# The minimum cost of a step with sparse attention, as a share of its full cost.
_MIN_COST_SHARE = 1e-3
# How much more rows may cost, as a share, if every batch mixes all lengths instead of
# having examples of one length.
_MIXING = 0.01
# Lengths count as alike if their logarithms vary by much less than this.
_SIMILAR = math.log(1.25) ** 2
# `[Q]`, the T of each sequence.
Shape: TypeAlias = tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class RowChoice:
    """The packed rows for one choice of shapes.

    Attributes:
      shapes: the shapes, in the order of a plan.
      plan: the buckets, with the cost of a step of each.
      rows: `[K]` int64, the number of rows of each T.
      segments: `[K]` numbers, the number of examples in the rows of each T.
      padding: the share of padding in the rows.
      separation: the share of the variance of lengths that is between batches.
      cost: the cost of an epoch, remainders included.
      longest: `[K, Q]` integers, the fullest row of each shape in each sequence.
      is_used: `[K]` bool, whether a shape has batches, or is the last one.
      packing: the rows with slots for all examples; None for a sample.
    """

    shapes: tuple[Shape, ...]
    plan: BucketPlan
    rows: np.ndarray
    segments: np.ndarray
    padding: float
    separation: float
    cost: float
    longest: np.ndarray
    is_used: np.ndarray
    packing: Packing | None = None

    @property
    def rank(self) -> tuple[float, int]:
        """The sort key of a choice: its cost as `mixed_cost`, and its shapes."""
        return mixed_cost(self.cost, self.separation), len(self.plan)


def mixed_cost(cost: float, separation: float) -> float:
    """Returns a cost, raised by up to 1% if batches separate lengths."""
    return cost * (1 + _MIXING * separation)


def sparse_cost(
    positions: Sequence[int], costs: Sequence[float], attended: float
) -> float:
    """Returns the cost of a step whose attention skips some pairs of positions.

    The cost of the pairs is the quadratic part of the cost of a step.

    Example: of a cost of 10 T + T**2, a quarter of the pairs remains.
      >>> round(sparse_cost([8, 4, 2], [144, 56, 24], attended=0.25), 6)
      96.0

    Args:
      positions: three T of rows; the first one is that of the step.
      costs: the cost of a step of each T, if no pair is skipped.
      attended: the share of the pairs that is not skipped, from 0 to 1.
    """
    per_pair = 0.0
    if len(set(positions)) == 3:
        per_pair = np.polyfit(positions, costs, 2)[0]
    pairs = np.clip(per_pair * positions[0] ** 2, 0.0, costs[0])
    return float(max(costs[0] - pairs * (1 - attended), _MIN_COST_SHARE * costs[0]))


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
    """Returns the variance over tokens of the logarithms of `[V]` counted lengths."""
    weights = lengths * (counts / float(lengths @ counts))
    logs = np.log(lengths)
    return float(weights @ np.square(logs - weights @ logs))
