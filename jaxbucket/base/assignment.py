"""Finds the bucket of each example by its length, or by those of its sequences."""

from __future__ import annotations

import numpy as np

from jaxbucket.base.checks import MAX_LENGTH

# Examples that are processed at a time. Converted to int16 chunk by chunk: an int64
# result for 10M lengths needs 80 MB.
_CHUNK = 1 << 18


def shortest(lengths: np.ndarray, seq_lens: np.ndarray) -> np.ndarray:
    """Returns the first T that holds each example, `[N]` int16; K if there is none.

    Args:
      lengths: `[N]` integers.
      seq_lens: `[K]` increasing integers, the T.
    """
    # With equal dtypes, searchsorted does not convert the long array.
    edges = np.minimum(seq_lens, MAX_LENGTH).astype(lengths.dtype)
    index = np.empty(lengths.size, np.int16)
    for start in range(0, lengths.size, _CHUNK):
        part = slice(start, start + _CHUNK)
        index[part] = np.searchsorted(edges, lengths[part])
    return index


def cheapest(
    lengths: np.ndarray, seq_lens: np.ndarray, row_costs: np.ndarray
) -> np.ndarray:
    """Returns the cheapest shape that holds all sequences of each example.

    Example:
      >>> cheapest(np.array([[3, 1], [3, 4]]), np.array([[4, 2], [4, 4]]), np.ones(2))
      array([0, 1], dtype=int16)

    Args:
      lengths: `[N, Q]` integers.
      seq_lens: `[K, Q]` integers, the T of each sequence.
      row_costs: `[K]` numbers, the cost of a row. The first of equal ones is taken.

    Returns:
      `[N]` int16, K for an example that no shape holds.
    """
    order = np.argsort(row_costs, kind="stable")
    index = np.full(len(lengths), len(seq_lens), np.int16)
    for start in range(0, len(lengths), _CHUNK):
        part = slice(start, start + _CHUNK)
        columns, chosen = np.ascontiguousarray(lengths[part].T), index[part]
        for shape in order[::-1]:
            fits = np.ones(len(chosen), bool)
            for column, seq_len in zip(columns, seq_lens[shape].tolist(), strict=True):
                fits &= column <= seq_len
            chosen[fits] = shape
    return index
