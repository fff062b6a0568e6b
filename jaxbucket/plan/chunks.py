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


def chunk_lengths(lengths: ArrayLike, max_seq_len: int) -> np.ndarray:
    """Returns the lengths of the chunks that `split_source` cuts examples into.

    Example:
      >>> chunk_lengths([3, 10, 8], max_seq_len=4)
      array([3, 4, 4, 2, 4, 4], dtype=int32)

    Args:
      lengths: `[N]` integers, one per example.
      max_seq_len: the length of every chunk but an example's last one, which has the
        rest.

    Returns:
      `[M]` int32: the chunks of the first example, then those of the next.

    Raises:
      ValueError: for lengths that `check_lengths` refuses, `max_seq_len` that is not a
        positive integer, or more chunks than this machine has memory for.
    """
    lengths = check_lengths(lengths)
    counts = chunk_counts(lengths, max_seq_len)
    longest = _longest(max_seq_len)
    ends = np.cumsum(counts, dtype=np.int64)
    chunks = _full(int(ends[-1]), longest)
    chunks[ends - 1] = lengths - (counts - 1) * longest
    return chunks


def chunk_counts(lengths: np.ndarray, max_seq_len: int) -> np.ndarray:
    """Returns how many chunks each example is cut into, `[N]` integers.

    Raises:
      ValueError: if `max_seq_len` is not a positive integer.
    """
    longest = _longest(max_seq_len)
    return -(-lengths // longest)


def last_chunks(lengths: np.ndarray, max_seq_len: int) -> tuple[np.ndarray, int]:
    """Returns the lengths of last chunks, and how many full ones stand before them.

    Unlike `chunk_lengths` it takes no memory for full chunks.

    Example:
      >>> last_chunks(np.array([3, 10, 8]), max_seq_len=4)
      (array([3, 2, 4]), 3)

    Returns:
      `[N]` integers, the length of each example's last chunk; and the number of chunks
      before these, of `max_seq_len` each.
    """
    longest = _longest(max_seq_len)
    before = (lengths - 1) // longest
    return lengths - before * longest, int(before.sum(dtype=np.int64))


def _full(number: int, longest: int) -> np.ndarray:
    """Chunks that are as long as can be."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # Beyond it, some systems promise memory and end the process that writes to it.
    if 4 * number <= memory:
        with contextlib.suppress(MemoryError):
            return np.full(number, longest, np.int32)
    raise ValueError(
        f"`max_seq_len={longest}` makes {number} chunks, whose lengths take "
        f"{4 * number / 2**30:.1f} GiB: more memory than there is. Raise "
        "`max_seq_len`, or split the corpus in parts."
    )


def _longest(max_seq_len: int) -> int:
    """`max_seq_len` as a number that divides lengths of 32 bits."""
    return min(check_positive("max_seq_len", max_seq_len), MAX_LENGTH)
