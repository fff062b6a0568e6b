"""Counts of lengths: how many examples and tokens are at most so long."""

from __future__ import annotations

import numpy as np

from jaxbucket.base.buckets import Overlong
from jaxbucket.plan.chunks import last_chunks

# Up to here one count for every length is cheaper than sorting them.
_DENSE = 1 << 24
# Lengths that are counted together: bounds memory.
_CHUNK = 1 << 20


def cumulative(
    lengths: np.ndarray, last: int, multiple: int, overlong: Overlong
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns lengths at which a bucket may end, and the examples up to each.

    Example:
      >>> cumulative(np.array([3, 5, 5, 9]), 8, 4, "truncate")
      (array([4, 8]), array([1, 4]), array([ 3, 21]))

    Args:
      lengths: `[N]` positive integers.
      last: the longest length of a bucket, a multiple of `multiple`.
      multiple: a divisor of every length at which a bucket may end.
      overlong: examples longer than `last` count as `last` when truncated, as their
        chunks when split, and not at all when dropped.

    Returns:
      `[G]` int64 lengths, increasing, the last of them `last`; `[G]` int64 examples and
      `[G]` int64 their tokens.

    Raises:
      ValueError: if no example is left.
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
    if last <= _DENSE:
        ends = np.arange(multiple, last + 1, multiple)
    else:
        ends = np.unique(np.append(-(-values // multiple) * multiple, last))
    # Where each end lies among the lengths, with nothing at all before the first.
    below = np.searchsorted(values, ends, side="right")
    examples = np.append(0, np.cumsum(counts))[below]
    tokens = np.append(0, np.cumsum(counts * values))[below]
    if overlong == "truncate":
        full = over
    examples[-1] += full
    tokens[-1] += full * last
    if examples[-1] == 0:
        raise ValueError(
            f"Every example is longer than `max_seq_len={last}` and "
            "`overlong='drop'` leaves it out. Raise `max_seq_len`."
        )
    return ends, examples, tokens


def value_counts(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the different lengths, `[V]` increasing, and how many have each, `[V]`.

    Example:
      >>> value_counts(np.array([5, 3, 5]))
      (array([3, 5]), array([1, 2]))
    """
    last = int(lengths.max())
    if last > _DENSE:
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
    """Returns at most so many lengths: each the mean of equally many neighbors.

    Example:
      >>> grouped(np.array([1, 3, 8, 9]), np.array([3, 1, 1, 1]), most=2)
      (array([2, 8]), array([4, 2]))
    """
    size = -(-len(values) // most)
    starts = np.arange(0, len(values), size)
    together = np.add.reduceat(counts, starts)
    means = np.rint(np.add.reduceat(values * counts, starts) / together)
    return means.astype(np.int64), together
