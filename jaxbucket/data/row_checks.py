"""Checks the rows of a batch before their tokens are gathered."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.batch import EMPTY_ROW
from jaxbucket.base.bucket import Bucket


def check_rows(rows: ArrayLike, num_examples: int, bucket: Bucket) -> np.ndarray:
    """Returns the rows of a batch as int64, which cannot overflow when 1 is added.

    Args:
      rows: `[B]` or `[B, max_segments]` integers, -1 for an empty entry.
      num_examples: number of examples in the source.
      bucket: the shape (B, T).

    Raises:
      ValueError: if the dtype, shape or values of `rows` are invalid.
    """
    rows = np.asarray(rows)
    if rows.dtype.kind not in "iu":
        raise ValueError(f"`rows` has dtype {rows.dtype}. Pass integers.")
    if rows.ndim not in (1, 2):
        raise ValueError(
            f"`rows` has {rows.ndim} dimensions. Pass `[B]` or `[B, max_segments]`."
        )
    if len(rows) != bucket.batch_size:
        raise ValueError(
            f"`rows` has {len(rows)} entries, but bucket {bucket} has "
            f"{bucket.batch_size} rows. Pass one entry for each, -1 for an empty row."
        )
    if rows.ndim == 2 and np.any((rows[:, :-1] < 0) & (rows[:, 1:] >= 0)):
        raise ValueError(
            "`rows` has an example after an empty entry of the same row. Put all -1 "
            "entries after the last example."
        )
    if rows.min(initial=0) < EMPTY_ROW or rows.max(initial=0) >= num_examples:
        raise ValueError(
            f"`rows` has values from {rows.min()} to {rows.max()}. They must be from 0 "
            f"to {num_examples - 1}, or -1 for an empty row."
        )
    return rows.astype(np.int64, copy=False)


def check_row_lengths(lengths: np.ndarray, bucket: Bucket) -> None:
    """Raises a ValueError if a row is longer than the bucket's T.

    Args:
      lengths: `[B]` integers; or, for packed rows, `[B, max_segments]`.
      bucket: the shape (B, T).
    """
    packed = lengths.ndim == 2
    if packed:
        lengths = lengths.sum(axis=1)
    if lengths.max(initial=0) > bucket.tokens_per_row:
        row = int(lengths.argmax())
        seq_len = bucket.tokens_per_row
        raise too_long_error(row, lengths[row], seq_len, packed=packed)


def span_lengths(
    rows: np.ndarray,
    begins: np.ndarray,
    lengths: np.ndarray,
    example_lengths: np.ndarray,
) -> np.ndarray:
    """Returns the lengths of spans of examples, 0 for empty entries of `rows`.

    Args:
      rows: `[B]` or `[B, max_segments]` integers, -1 for an empty entry.
      begins: integers of the same shape, the first token of each span within its
        example.
      lengths: integers of the same shape, the number of tokens of each span.
      example_lengths: integers of the same shape, the lengths of the whole examples.

    Raises:
      ValueError: if a span is empty or not within its example.
    """
    filled = rows != EMPTY_ROW
    inside = (begins >= 0) & (lengths >= 1) & (lengths <= example_lengths - begins)
    if not inside[filled].all():
        place = np.unravel_index(np.argmin(inside | ~filled), rows.shape)
        raise ValueError(
            f"Row {place[0]}: a span of {lengths[place]} tokens from token "
            f"{begins[place]} is not within example {rows[place]}, which has "
            f"{example_lengths[place]} tokens. Pass a non-empty span that ends within "
            "the example."
        )
    return np.where(filled, lengths, 0)


def too_long_error(
    row: int, length: int, seq_len: int, suffix: str = "", packed: bool = False
) -> ValueError:
    """Returns the error for a row that is longer than T.

    Args:
      row: index of the row in the batch.
      length: length of the row.
      seq_len: T.
      suffix: text that names the sequence, such as " of 'inputs'".
      packed: whether rows hold several examples.
    """
    remedy = "Use a longer bucket, or pass `truncate=True`."
    if packed:
        remedy = "Put fewer examples into the row, or use longer rows."
    return ValueError(
        f"Row {row} has length {length}{suffix}, beyond `seq_len={seq_len}`. {remedy}"
    )
