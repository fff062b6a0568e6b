"""Segment ids and positions of rows, computed from example lengths."""

from __future__ import annotations

import numpy as np

from jaxbucket.base.batch import Batch
from jaxbucket.base.bucket import Bucket
from jaxbucket.base.notes import Noting


def row_segments(lengths: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the segment ids and positions of packed rows.

    Example:
      >>> ids, positions = row_segments(np.array([[2, 1], [3, 0]]), seq_len=4)
      >>> print(ids, positions, sep="\\n")
      [[1 1 2 0]
       [1 1 1 0]]
      [[0 1 0 0]
       [0 1 2 0]]

    Args:
      lengths: `[B, S]` integers, the lengths of the examples in each row, 0 after the
        last one. The lengths of a row add up to at most `seq_len`.
      seq_len: T.

    Returns:
      `(segment_ids, positions)`, both `[B, T]` int32 with 0 in padding.
    """
    num_rows = len(lengths)
    rows, segments = np.nonzero(lengths)
    starts = (np.cumsum(lengths, axis=1) - lengths)[rows, segments]
    is_start = np.zeros((num_rows, seq_len), np.int32)
    is_start[rows, starts] = 1
    # The start of the example of each token.
    first = np.zeros((num_rows, seq_len), np.int32)
    first[rows, starts] = starts
    places = np.arange(seq_len, dtype=np.int32)
    mask = places < lengths.sum(axis=1)[:, None]
    ids = np.cumsum(is_start, axis=1, dtype=np.int32) * mask
    positions = (places - np.maximum.accumulate(first, axis=1)) * mask
    return ids, positions


def row_mask(lengths: np.ndarray, bucket: Bucket) -> np.ndarray:
    """Returns `[B, T]` bool, True at the tokens of rows with these `[B]` lengths."""
    # Comparing two int32 arrays is several times as fast as mixing dtypes.
    positions = np.arange(bucket.tokens_per_row, dtype=np.int32)
    return positions < lengths.astype(np.int32)[:, None]


def with_segments(
    features: dict[str, np.ndarray], name: str, mask: np.ndarray
) -> Batch:
    """Returns a batch with one example in each row.

    Args:
      features: the features of the batch.
      name: the entry name in `segment_ids` and `positions`.
      mask: `[B, T]` bool, True for real tokens.
    """
    ids = mask.astype(np.int32)
    positions = np.arange(mask.shape[1], dtype=np.int32)
    return Batch(features, {name: ids}, {name: ids * positions})


def check_row_lengths(lengths: np.ndarray, bucket: Bucket) -> None:
    """Raises a ValueError if a row is longer than the bucket's T.

    Args:
      lengths: `[B]` integers; or, for packed rows, `[B, max_segments]`.
      bucket: the shape (B, T).
    """
    totals = lengths if lengths.ndim == 1 else lengths.sum(axis=1)
    if totals.max(initial=0) > bucket.tokens_per_row:
        row = int(totals.argmax())
        with Noting(f"This is row {row} of the batch."):
            packed = lengths.ndim == 2
            raise too_long_error(totals[row], bucket.tokens_per_row, packed)


def too_long_error(
    length: int, seq_len: int, packed: bool, suffix: str = ""
) -> ValueError:
    """Returns the error for a row that is longer than T.

    Args:
      length: length of the row.
      seq_len: T.
      packed: whether rows hold several examples.
      suffix: text that names the sequence, such as " of 'inputs'".
    """
    remedy = "Use a longer bucket, or pass `truncate=True`."
    if packed:
        remedy = "Put fewer examples into the row, or use longer rows."
    return ValueError(
        f"The row has length {length}{suffix}, beyond `seq_len={seq_len}`. {remedy}"
    )
