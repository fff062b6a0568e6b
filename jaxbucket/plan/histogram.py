"""Counts of examples and tokens: by length, cumulative, and by bucket."""

from __future__ import annotations

from typing import cast

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.checks import check_lengths
from jaxbucket.base.lengths import Lengths
from jaxbucket.plan.chunks import last_chunks

# Up to this length, a table of counts is cheaper than sorting the lengths.
_MAX_TABLE = 1 << 24
# The number of lengths that are counted at a time, which limits the memory.
_CHUNK = 1 << 20


def value_counts(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the distinct lengths, `[V]` increasing, and their counts, `[V]`.

    Example:
      >>> value_counts(np.array([5, 3, 5]))
      (array([3, 5]), array([1, 2]))
    """
    last = int(lengths.max())
    if last > _MAX_TABLE:
        return np.unique(lengths, return_counts=True)
    counts = np.zeros(last + 1, np.int64)
    for start in range(0, lengths.size, _CHUNK):
        part = lengths[start : start + _CHUNK]
        counts += np.bincount(part, minlength=last + 1)
    values = np.flatnonzero(counts)
    return values, counts[values]


def example_counts(plan: BucketPlan, lengths: Lengths) -> np.ndarray:
    """Returns the number of examples, or of chunks, of each bucket, `[K]` int64.

    Args:
      plan: the buckets.
      lengths: `[N]` integers, one per example; or a mapping from sequence name to
        `[N]`.

    Raises:
      ValueError: if `plan.check` raises it.
    """
    full = 0
    if plan.overlong == "split":
        lengths, full = last_chunks(
            check_lengths(cast(ArrayLike, lengths)), plan.max_seq_len
        )
    counts = np.bincount(plan.assign(lengths).astype(np.int64) + 1)
    counts = np.pad(counts, (0, len(plan) + 1 - len(counts)))[1:]
    counts[-1] += full
    return counts
