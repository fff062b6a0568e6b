"""Lengths of the chunks that examples are cut into where they are too long.

The chunks of an example stand together and in order: full ones first, then the rest.
No chunk is empty, and an example that is not too long is one chunk.
"""

from __future__ import annotations

import contextlib
import os

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.checks import MAX_LENGTH, check_lengths, check_positive

# Lengths that are cut together: arrays in between stay in the cache.
_PART = 1 << 16


def chunk_lengths(lengths: ArrayLike, max_seq_len: int) -> np.ndarray:
    """Returns the lengths of the chunks that `split_source` cuts examples into.

    Example:
      >>> chunk_lengths([3, 10, 8], max_seq_len=4)
      array([3, 4, 4, 2, 4, 4], dtype=int32)

    Args:
      lengths: `[N]` integers, one per example.
      max_seq_len: what a chunk has at most, and all but an example's last one have.

    Returns:
      `[M]` int32: those of the first example, then those of the next.

    Raises:
      ValueError: for lengths that `check_lengths` refuses, `max_seq_len` that is not a
        positive integer, or more chunks than this machine has memory for.
    """
    lengths = check_lengths(lengths)
    counts = chunk_counts(lengths, max_seq_len)
    longest = _longest(max_seq_len)
    # Most are full; it is the last ones that have to be found.
    chunks = _full(int(counts.sum(dtype=np.int64)), longest)
    end = 0
    for start in range(0, len(lengths), _PART):
        own = counts[start : start + _PART]
        ends = end + np.cumsum(own, dtype=np.int64)
        chunks[ends - 1] = lengths[start : start + _PART] - (own - 1) * longest
        end = int(ends[-1])
    return chunks


def chunk_counts(lengths: np.ndarray, max_seq_len: int) -> np.ndarray:
    """Returns how many chunks each example is cut into, `[N]` integers.

    Raises:
      ValueError: if `max_seq_len` is not a positive integer.
    """
    longest = _longest(max_seq_len)
    return -(-lengths // longest)


def last_chunks(lengths: np.ndarray, max_seq_len: int) -> tuple[np.ndarray, int]:
    """Returns the lengths of chunks without those that are full.

    In place of `chunk_lengths` where chunks are counted, of which there may be more
    than there is memory for.

    Example:
      >>> last_chunks(np.array([3, 10, 8]), max_seq_len=4)
      (array([3, 2, 4]), 3)

    Returns:
      `[N]` integers, the length of each example's last chunk; and the number of chunks
      before these, of `max_seq_len` each.
    """
    longest = _longest(max_seq_len)
    lasts, full = lengths.copy(), 0
    for start in range(0, lengths.size, _PART):
        part = lasts[start : start + _PART]
        over = part > longest
        if over.any():
            before = (part[over] - 1) // longest
            full += int(before.sum(dtype=np.int64))
            part[over] -= before * longest
    return lasts, full


def _full(number: int, longest: int) -> np.ndarray:
    """Chunks that are as long as can be."""
    # Where a system promises memory that it has not, the process would be killed.
    if 4 * number <= _memory():
        with contextlib.suppress(MemoryError):
            return np.full(number, longest, np.int32)
    raise ValueError(
        f"`max_seq_len={longest}` makes {number} chunks, whose lengths take "
        f"{4 * number / 2**30:.1f} GiB: more memory than there is. Raise "
        "`max_seq_len`, or split the corpus in parts."
    )


def _memory() -> int:
    """Bytes that this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _longest(max_seq_len: int) -> int:
    """It as a number that lengths of 32 bits can be divided by."""
    return min(check_positive("max_seq_len", max_seq_len), MAX_LENGTH)
