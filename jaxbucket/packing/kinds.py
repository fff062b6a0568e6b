"""Examples of several sequences by their lengths: a histogram of pairs, or of more.

Examples whose sequences are all as long as another's are of one *kind*.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def kinds_of(
    lengths: np.ndarray, capacities: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the kinds, `[V, Q]` int32 in order, and how many examples have each.

    Example:
      >>> kinds_of(np.array([[3, 1], [2, 5], [3, 1]]), capacities=[8, 8])
      (array([[2, 5],
             [3, 1]], dtype=int32), array([1, 2]))

    Args:
      lengths: `[N, Q]` positive integers, at most `capacities`.
      capacities: `[Q]` what a row holds of each sequence.
    """
    _, first, counts = np.unique(
        _numbers(lengths, capacities), return_index=True, return_counts=True
    )
    return lengths[first].astype(np.int32), counts


def grouped_kinds(
    kinds: np.ndarray, counts: np.ndarray, capacities: Sequence[int], most: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns groups of kinds, so many at most, as long as their longest may be.

    Lengths are rounded up to a multiple, 1, 2, 4, ..., or to all that a row holds.

    Example:
      >>> kinds, counts = np.array([[1, 1], [2, 2], [5, 1]]), np.array([1, 2, 1])
      >>> grouped_kinds(kinds, counts, capacities=[8, 8], most=2)
      (array([[2, 2],
             [6, 2]], dtype=int32), array([3, 1]), array([0, 1, 2]))

    Args:
      kinds: `[V, Q]`.
      counts: `[V]` examples of each.
      capacities: `[Q]` what a row holds of each sequence.
      most: groups there may be.

    Returns:
      `[G, Q]` int32 lengths; `[G]` examples of each; `[V]` the kinds of the first
      group, then those of the next.
    """
    step, rounded, group = 1, kinds, np.arange(len(kinds))
    while len(rounded) > most:
        step *= 2
        up = np.minimum(-(-kinds // step) * step, capacities)
        _, first, group = np.unique(
            _numbers(up, capacities), return_index=True, return_inverse=True
        )
        rounded = up[first].astype(np.int32)
    number = np.bincount(group, counts, len(rounded)).astype(np.int64)
    return rounded, number, np.argsort(group, kind="stable")


def _numbers(lengths: np.ndarray, capacities: Sequence[int]) -> np.ndarray:
    """`[N]` numbers in the order of the lengths, the same where all lengths are."""
    if math.prod(size + 1 for size in capacities) < 2**63:
        numbers = np.zeros(len(lengths), np.int64)
        for column, size in enumerate(capacities):
            numbers = numbers * (size + 1) + lengths[:, column]
        return numbers
    return np.unique(lengths, axis=0, return_inverse=True)[1].reshape(-1)
