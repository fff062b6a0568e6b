"""Counts of examples and tokens: by length, cumulative, and by bucket."""

from __future__ import annotations

from typing import cast

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.checks import check_lengths
from jaxbucket.base.lengths import Lengths
from jaxbucket.base.policies import TRUNCATING, Overlong
from jaxbucket.plan.chunks import last_chunks

# Up to this length, a table of counts is cheaper than sorting the lengths.
_MAX_TABLE = 1 << 24
# The number of lengths that are counted at a time, which limits the memory.
_CHUNK = 1 << 20


def cumulative(
    lengths: np.ndarray, last: int, multiple: int, overlong: Overlong
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns lengths at which a bucket may end, and counts of the examples up to each.

    Example:
      >>> cumulative(np.array([3, 5, 5, 9]), 8, 4, "truncate")
      (array([4, 8]), array([1, 4]), array([ 3, 21]))

    Args:
      lengths: `[N]` positive integers.
      last: the length of the last bucket, a multiple of `multiple`.
      multiple: the number of which every boundary is a multiple.
      overlong: the policy for examples longer than `last`: "truncate" and
        "truncate_left" count them with the length `last`, "split" counts their chunks,
        and "drop" leaves them out.

    Returns:
      `[G]` int64, increasing lengths that end with `last`; `[G]` int64, the number of
      examples that are at most this long; and `[G]` int64, the number of their tokens.

    Raises:
      ValueError: if all examples are dropped.
    """
    full = 0
    if overlong == "split":
        lengths, full = last_chunks(lengths, last)
    elif lengths.max() > last:
        lengths = np.minimum(lengths, last + 1)
    values, counts = value_counts(lengths)
    values, over = values.astype(np.int64), 0
    if values[-1] > last:
        values, counts, over = values[:-1], counts[:-1], int(counts[-1])
    if last <= _MAX_TABLE:
        ends = np.arange(multiple, last + 1, multiple)
    else:
        ends = np.unique(np.append(-(-values // multiple) * multiple, last))
    # The number of distinct lengths up to each end; it may be 0 for the first ends.
    num_values = np.searchsorted(values, ends, side="right")
    examples = np.append(0, np.cumsum(counts))[num_values]
    tokens = np.append(0, np.cumsum(counts * values))[num_values]
    if overlong in TRUNCATING:
        full = over
    examples[-1] += full
    tokens[-1] += full * last
    if examples[-1] == 0:
        raise ValueError(
            f"Every example is longer than `max_seq_len={last}`, and "
            "`overlong='drop'` leaves all of them out. Raise `max_seq_len`."
        )
    return ends, examples, tokens


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


def grouped(
    values: np.ndarray, counts: np.ndarray, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns at most `most` lengths with counts, by averaging neighboring lengths.

    Each group consists of the same number of consecutive lengths. Its length is their
    mean, weighted by the counts and rounded, and its count is the sum of the counts.

    Example:
      >>> grouped(np.array([1, 3, 8, 9]), np.array([3, 1, 1, 1]), most=2)
      (array([2, 8]), array([4, 2]))
    """
    size = -(-len(values) // most)
    starts = np.arange(0, len(values), size)
    totals = np.add.reduceat(counts, starts)
    means = np.rint(np.add.reduceat(values * counts, starts) / totals)
    return means.astype(np.int64), totals


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
