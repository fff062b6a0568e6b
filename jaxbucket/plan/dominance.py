"""Which shapes hold which examples, if examples have several lengths.

A shape holds an example if none of its Q sequences is longer than the shape's T for it.
A shape dominates another if it is at least as long in every sequence, so that it holds
all examples of the other.
"""

from __future__ import annotations

import numpy as np

# The number of examples that are compared at a time, so that they stay in the cache.
_CHUNK = 1 << 15


def fits(lengths: np.ndarray, seq_lens: np.ndarray) -> np.ndarray:
    """Returns whether each shape holds each example, `[N, K]` bool.

    Example:
      >>> fits(np.array([[3, 9]]), np.array([[4, 8], [4, 16]]))
      array([[False,  True]])

    Args:
      lengths: `[N, Q]` integers, the lengths of the sequences of each example.
      seq_lens: `[K, Q]` integers, the T of each shape.
    """
    held = np.ones((len(lengths), len(seq_lens)), bool)
    for column, ends in zip(lengths.T, seq_lens.T, strict=True):
        held &= column[:, None] <= ends
    return held


def dominates(seq_lens: np.ndarray) -> np.ndarray:
    """Returns whether shape j holds all examples of shape k, `[K, K]` bool at `[k, j]`.

    No shape dominates itself or an equal shape.

    Example:
      >>> dominates(np.array([[4, 8], [8, 4], [8, 8]])).astype(int)
      array([[0, 0, 1],
             [0, 0, 1],
             [0, 0, 0]])

    Args:
      seq_lens: `[..., K, Q]` integers, the T of each shape of one or several plans.
    """
    lower, upper = seq_lens[..., :, None, :], seq_lens[..., None, :, :]
    return (lower <= upper).all(axis=-1) & (lower != upper).any(axis=-1)


def shape_order(seq_lens: np.ndarray) -> np.ndarray:
    """Returns the order of shapes in a plan: by the sum of T, then by T, `[K]` indices.

    So a shape that dominates another is always later.

    Example:
      >>> shape_order(np.array([[8, 8], [8, 4], [4, 8]]))
      array([2, 1, 0])

    Args:
      seq_lens: `[..., K, Q]` integers, the T of each shape of one or several plans.
    """
    columns = [seq_lens[..., q] for q in reversed(range(seq_lens.shape[-1]))]
    return np.lexsort([*columns, seq_lens.sum(axis=-1)])


def assign_cheapest(
    lengths: np.ndarray, seq_lens: np.ndarray, rates: np.ndarray
) -> np.ndarray:
    """Returns the cheapest shape that holds each example, `[N]` int16.

    Example: the second example needs the second shape, and no shape holds the third.
      >>> shapes = np.array([[4, 8], [8, 8]])
      >>> assign_cheapest(np.array([[3, 5], [5, 5], [9, 1]]), shapes, np.array([1, 2]))
      array([ 0,  1, -1], dtype=int16)

    Args:
      lengths: `[N, Q]` integers, the lengths of the sequences of each example.
      seq_lens: `[K, Q]` integers, the T of each shape, in the order of the plan.
      rates: `[K]` numbers, the cost of a row: the cost of a batch divided by its B.
        Among equally cheap shapes, the first is taken.

    Returns:
      An index into `seq_lens`, or -1 if no shape holds the example.
    """
    shapes = np.full(len(lengths), -1, np.int16)
    # The cheapest shape is last, and replaces all others.
    order = np.argsort(rates, kind="stable")[::-1].tolist()
    for start in range(0, len(lengths), _CHUNK):
        columns = np.ascontiguousarray(lengths[start : start + _CHUNK].T)
        part = shapes[start : start + _CHUNK]
        for shape in order:
            held = columns[0] <= seq_lens[shape, 0]
            for column, end in zip(columns[1:], seq_lens[shape, 1:], strict=True):
                held &= column <= end
            part[held] = shape
    return shapes
