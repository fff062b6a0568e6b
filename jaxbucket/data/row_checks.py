"""Checks of the rows of a batch, before their tokens are gathered."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.batch import EMPTY_ROW
from jaxbucket.base.buckets import Bucket


def check_rows(rows: ArrayLike, num_examples: int, bucket: Bucket) -> np.ndarray:
    """Returns the rows of a batch as int64, so that one can be added to them.

    Args:
      rows: `[B]` or `[B, max_segments]` integers, -1 where there is no example.
      num_examples: how many there are.
      bucket: the shape (B, T).

    Raises:
      ValueError: if they are not integers, or not those of such a batch.
    """
    rows = np.asarray(rows)
    if rows.dtype.kind not in "iu":
        raise ValueError(f"`rows` has dtype {rows.dtype}: give integers.")
    if rows.ndim not in (1, 2):
        raise ValueError(
            f"`rows` has {rows.ndim} dimensions: give [B], or [B, max_segments]."
        )
    if len(rows) != bucket.batch_size:
        raise ValueError(
            f"`rows` has {len(rows)} entries, but bucket {bucket} has "
            f"{bucket.batch_size} rows. Give one for each, -1 for an empty one."
        )
    if rows.ndim == 2 and np.any((rows[:, :-1] < 0) & (rows[:, 1:] >= 0)):
        raise ValueError(
            "`rows` has examples of a row behind an empty place: put -1 behind the "
            "last of them."
        )
    if rows.min(initial=0) < EMPTY_ROW or rows.max(initial=0) >= num_examples:
        raise ValueError(
            f"`rows` has {rows.min()} to {rows.max()}: they must be from 0 to "
            f"{num_examples - 1}, or -1 for an empty one."
        )
    return rows.astype(np.int64, copy=False)


def fit_lengths(lengths: np.ndarray, bucket: Bucket, truncate: bool) -> np.ndarray:
    """Returns the `[B]` lengths that rows of these lengths have in a bucket.

    Raises:
      ValueError: if one is longer than T, unless it may be truncated.
    """
    if not truncate and lengths.max(initial=0) > bucket.seq_len:
        row = int(lengths.argmax())
        raise beyond(row, lengths[row], bucket.seq_len)
    return np.minimum(lengths, bucket.seq_len)


def span_lengths(
    rows: np.ndarray,
    begins: np.ndarray,
    lengths: np.ndarray,
    example_lengths: np.ndarray,
) -> np.ndarray:
    """Returns the `[B]` lengths of parts of examples, 0 of an empty row.

    Args:
      rows: `[B]` integers, the example in each row; -1 for an empty row.
      begins: `[B]` integers, the first token of each part.
      lengths: `[B]` integers, the tokens it has.
      example_lengths: `[B]` integers, the tokens that its example has.

    Raises:
      ValueError: if a part has no token, or one that its example does not have.
    """
    filled = rows != EMPTY_ROW
    inside = (begins >= 0) & (lengths >= 1) & (lengths <= example_lengths - begins)
    if not inside[filled].all():
        row = int(np.argmin(inside | ~filled))
        raise ValueError(
            f"Row {row}: {lengths[row]} tokens from {begins[row]} on are not a part of "
            f"example {rows[row]}, which has {example_lengths[row]}. Give at "
            "least one token, and none beyond its end."
        )
    return np.where(filled, lengths, 0)


def beyond(
    row: int, length: int, seq_len: int, of: str = "", packed: bool = False
) -> ValueError:
    """Returns the error of a row that is longer than T.

    Args:
      row: where it stands in the batch.
      length: of the row.
      seq_len: T.
      of: which sequence it is of, for messages.
      packed: whether a row has several examples.
    """
    remedy = "Put it into a longer bucket, or pass `truncate=True`."
    if packed or of:
        remedy = "Give it fewer examples, or rows that hold more."
    return ValueError(
        f"Row {row} has length {length}{of}, beyond `seq_len={seq_len}`. {remedy}"
    )
