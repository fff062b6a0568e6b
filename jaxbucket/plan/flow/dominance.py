"""Which shapes hold which examples, if examples have several lengths.

A shape holds an example if none of its Q sequences is longer than the shape's T for it.
A shape dominates another if it is at least as long in every sequence, so that it holds
all examples of the other.
"""

from __future__ import annotations

import numpy as np


def fits(lengths: np.ndarray, seq_lens: np.ndarray) -> np.ndarray:
    """Returns whether each shape, `[K, Q]`, holds each example, `[N, Q]`, as `[N, K]`.

    Example:
      >>> fits(np.array([[3, 9]]), np.array([[4, 8], [4, 16]]))
      array([[False,  True]])
    """
    held = np.ones((len(lengths), len(seq_lens)), bool)
    for column, ends in zip(lengths.T, seq_lens.T, strict=True):
        held &= column[:, None] <= ends
    return held


def dominates(seq_lens: np.ndarray) -> np.ndarray:
    """Returns whether shape j holds all examples of shape k, `[K, K]` bool at `[k, j]`.

    No shape dominates itself or an equal shape. `seq_lens` are `[..., K, Q]`, the T of
    each shape of one or several plans.

    Example:
      >>> dominates(np.array([[4, 8], [8, 4], [8, 8]])).astype(int)
      array([[0, 0, 1],
             [0, 0, 1],
             [0, 0, 0]])
    """
    lower, upper = seq_lens[..., :, None, :], seq_lens[..., None, :, :]
    return (lower <= upper).all(axis=-1) & (lower != upper).any(axis=-1)


def is_maximal(seq_lens: np.ndarray) -> np.ndarray:
    """Returns whether no other of `[K, Q]` shapes dominates a shape, `[K]` bool.

    Every example that a shape holds is held by one of these.

    Example:
      >>> is_maximal(np.array([[4, 8], [8, 4], [2, 2]])).astype(int)
      array([1, 1, 0])
    """
    return np.asarray(~dominates(seq_lens).any(axis=1))


def shape_order(seq_lens: np.ndarray) -> np.ndarray:
    """Returns the order of shapes in a plan: by the sum of T, then by T, `[K]` indices.

    So a shape that dominates another is always later. `seq_lens` are `[..., K, Q]`, the
    T of each shape of one or several plans.

    Example:
      >>> shape_order(np.array([[8, 8], [8, 4], [4, 8]]))
      array([2, 1, 0])
    """
    columns = [seq_lens[..., q] for q in reversed(range(seq_lens.shape[-1]))]
    return np.lexsort([*columns, seq_lens.sum(axis=-1)])
