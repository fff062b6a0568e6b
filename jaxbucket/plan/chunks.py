"""The lengths of what is in rows: of examples that fit or are cut, and of chunks.

The chunks of an example are adjacent and in order: full chunks first, then the rest.
No chunk is empty, and an example that is not too long is a single chunk.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.checks import MAX_LENGTH, check_lengths, check_positive


def chunk_lengths(lengths: ArrayLike, max_seq_len: int) -> np.ndarray:
    """Returns the lengths of the chunks that `split_source` splits examples into.

    Example:
      >>> chunk_lengths([3, 10, 8], max_seq_len=4)
      array([3, 4, 4, 2, 4, 4], dtype=int32)

    Args:
      lengths: `[N]` integers, one per example.
      max_seq_len: the length of every chunk except the last chunk of an example, which
        holds the rest.

    Returns:
      `[M]` int32, the chunk lengths of the first example, then of the second, and so
      on.

    Raises:
      ValueError: if `lengths` or `max_seq_len` are not positive integers.
    """
    lengths = check_lengths(lengths)
    longest = min(check_positive("max_seq_len", max_seq_len), MAX_LENGTH)
    counts = -(-lengths // longest)
    ends = np.cumsum(counts, dtype=np.int64)
    chunks = np.full(ends[-1], longest, np.int32)
    chunks[ends - 1] = lengths - (counts - 1) * longest
    return chunks


def row_lengths(plan: BucketPlan, lengths: Any) -> Any:
    """Returns the lengths of rows: those of chunks if the plan splits examples."""
    if plan.overlong != "split":
        return lengths
    return chunk_lengths(lengths, plan.max_seq_len)


def kept_lengths(lengths: Any, seq_len: Any, overlong: Any) -> np.ndarray:
    """Returns the lengths of the examples or chunks in rows, `[n, Q]`.

    Example:
      >>> kept_lengths([3, 9, 5], 6, "truncate").T, kept_lengths([3, 9], 6, "drop")
      (array([[3, 6, 5]]), array([[3]]))

    Args:
      lengths: `[N]` integers, one per example; sequence name -> `[N]` integers; or
        `[N, Q]` integers, if `seq_len` is a mapping.
      seq_len: the longest T, or sequence name -> T.
      overlong: what happens to longer examples, as for `BucketPlan`.
    """
    plan = BucketPlan.from_shapes([(1, seq_len)], overlong=overlong)
    kept = plan.kept_lengths(row_lengths(plan, lengths))
    if not len(kept):
        raise ValueError(nothing_left(seq_len))
    return kept.reshape(len(kept), -1)


def nothing_left(max_seq_len: Any) -> str:
    """Returns the error message if every example is dropped."""
    return (
        f"`max_seq_len={max_seq_len!r}` is shorter than every example, and "
        "`overlong='drop'` leaves all of them out. Raise it."
    )
