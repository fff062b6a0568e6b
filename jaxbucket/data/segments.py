"""Segment ids and positions of rows, from the lengths of what is in them."""

from __future__ import annotations

import numpy as np

from jaxbucket.base.batch import Batch
from jaxbucket.base.buckets import Bucket


def row_segments(lengths: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the segment ids and the positions of rows of several examples.

    Example:
      >>> ids, positions = row_segments(np.array([[2, 1], [3, 0]]), seq_len=4)
      >>> print(ids, positions, sep="\\n")
      [[1 1 2 0]
       [1 1 1 0]]
      [[0 1 0 0]
       [0 1 2 0]]

    Args:
      lengths: `[B, S]` integers, of the examples in each row; 0 after the last. Those
        of a row are at most `seq_len` together.
      seq_len: T.

    Returns:
      Two arrays `[B, T]` int32; 0 in padding.
    """
    num_rows = len(lengths)
    rows, segments = np.nonzero(lengths)
    starts = (np.cumsum(lengths, axis=1) - lengths)[rows, segments]
    begins = np.zeros((num_rows, seq_len), np.int32)
    begins[rows, starts] = 1
    # Where each token's example begins.
    first = np.zeros((num_rows, seq_len), np.int32)
    first[rows, starts] = starts
    places = np.arange(seq_len, dtype=np.int32)
    mask = places < lengths.sum(axis=1)[:, None]
    ids = np.cumsum(begins, axis=1, dtype=np.int32) * mask
    positions = (places - np.maximum.accumulate(first, axis=1)) * mask
    return ids, positions


def row_mask(lengths: np.ndarray, bucket: Bucket) -> np.ndarray:
    """Returns `[B, T]` bool: where rows of these `[B]` lengths have a token."""
    # Equal dtypes, of 32 bits: several times as fast.
    positions = np.arange(bucket.seq_len, dtype=np.int32)
    return positions < lengths.astype(np.int32)[:, None]


def with_segments(
    features: dict[str, np.ndarray], name: str, mask: np.ndarray
) -> Batch:
    """Returns the batch of one example in each row.

    Args:
      features: those of the batch.
      name: the entry in `segment_ids` and `positions`.
      mask: `[B, T]` bool, where a token is real.
    """
    ids = mask.astype(np.int32)
    positions = np.arange(mask.shape[1], dtype=np.int32)
    return Batch(features, {name: ids}, {name: ids * positions})
