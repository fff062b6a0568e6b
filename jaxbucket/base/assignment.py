"""Finds the bucket of each example by its length, or by those of its sequences."""

from __future__ import annotations

import numpy as np

from jaxbucket.base.checks import MAX_LENGTH

# Examples that are processed at a time. Converted to int16 chunk by chunk: an int64
# result for 10M lengths needs 80 MB.
_CHUNK = 1 << 18
# Fewer are compared with all shapes at a time, so that they stay in the cache.
_COMPARED = 1 << 15


def shortest(lengths: np.ndarray, seq_lens: np.ndarray) -> np.ndarray:
    """Returns the first T that holds each example, `[N]` int16; K if there is none.

    Args:
      lengths: `[N]` integers.
      seq_lens: `[K]` increasing integers, the T.
    """
    # With equal dtypes, searchsorted does not convert the long array.
    most = min(MAX_LENGTH, np.iinfo(lengths.dtype).max)
    edges = np.minimum(seq_lens, most).astype(lengths.dtype)
    index = np.empty(lengths.size, np.int16)
    for start in range(0, lengths.size, _CHUNK):
        part = slice(start, start + _CHUNK)
        index[part] = np.searchsorted(edges, lengths[part])
    return index


def cheapest(
    lengths: np.ndarray, seq_lens: np.ndarray, row_costs: np.ndarray
) -> np.ndarray:
    """Returns the cheapest shape that holds all sequences of each example, `[N]` int16.

    Example: the second example needs the second shape, and no shape holds the third.
      >>> shapes = np.array([[4, 8], [8, 8]])
      >>> cheapest(np.array([[3, 5], [5, 5], [9, 1]]), shapes, np.array([1, 2]))
      array([ 0,  1, -1], dtype=int16)

    Args:
      lengths: `[N, Q]` integers, the lengths of the sequences of each example.
      seq_lens: `[K, Q]` integers, the T of each shape, in the order of the plan.
      row_costs: `[K]` numbers, the cost of a row: the cost of a batch divided by its B.
        Among equally cheap shapes, the first is taken.

    Returns:
      An index into `seq_lens`, or -1 if no shape holds the example.
    """
    shapes = np.full(len(lengths), -1, np.int16)
    # The cheapest shape is last, and replaces all others.
    order = np.argsort(row_costs, kind="stable")[::-1].tolist()
    for start in range(0, len(lengths), _COMPARED):
        columns = np.ascontiguousarray(lengths[start : start + _COMPARED].T)
        part = shapes[start : start + _COMPARED]
        for shape in order:
            held = columns[0] <= seq_lens[shape, 0]
            for column, end in zip(columns[1:], seq_lens[shape, 1:], strict=True):
                held &= column <= end
            part[held] = shape
    return shapes
