"""How many examples, and how many of their tokens, are at most so long."""

from __future__ import annotations

import numpy as np

from jaxbucket.base.buckets import Overlong
from jaxbucket.plan.chunks import last_chunks

# Up to here one count for every length is cheaper than sorting them.
_DENSE = 1 << 24
_CHUNK = 1 << 20


def cumulative(
    lengths: np.ndarray, last: int, multiple: int, overlong: Overlong
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns lengths at which a bucket may end, and what is at most that long.

    Example:
      >>> cumulative(np.array([3, 5, 5, 9]), 8, 4, "truncate")
      (array([4, 8]), array([1, 4]), array([ 3, 21]))

    Args:
      lengths: `[N]` positive integers.
      last: the longest, a multiple of `multiple`.
      multiple: of which they all are.
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
    if last <= _DENSE:
        per_length = _counts(lengths, last)
        over = int(per_length[-1])
        ends = np.arange(multiple, last + 1, multiple)
        examples = np.cumsum(per_length[:-1])[ends]
        tokens = np.cumsum(per_length[:-1] * np.arange(last + 1))[ends]
    else:
        kept = lengths[lengths <= last].astype(np.int64)
        over = len(lengths) - len(kept)
        values, counts = np.unique(kept, return_counts=True)
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
    counts = _counts(lengths, last)[:-1]
    values = np.flatnonzero(counts)
    return values, counts[values]


def grouped(
    values: np.ndarray, counts: np.ndarray, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns so many lengths at most, for equally many neighbours the mean of each.

    Example:
      >>> grouped(np.array([1, 3, 8, 9]), np.array([3, 1, 1, 1]), most=2)
      (array([2, 8]), array([4, 2]))
    """
    size = -(-len(values) // most)
    starts = np.arange(0, len(values), size)
    together = np.add.reduceat(counts, starts)
    means = np.rint(np.add.reduceat(values * counts, starts) / together)
    return means.astype(np.int64), together


def _counts(lengths: np.ndarray, last: int) -> np.ndarray:
    """`[last + 2]`: examples of each length; all longer ones in the last entry."""
    counts = np.zeros(last + 2, np.int64)
    for start in range(0, lengths.size, _CHUNK):
        part = np.minimum(lengths[start : start + _CHUNK], last + 1)
        counts += np.bincount(part, minlength=last + 2)
    return counts
