"""The lengths of examples and the T of rows, `[Q]` numbers each, that packers work on.

For example, a row may have room for 512 tokens of inputs and, separately, for 128
tokens of targets. Examples with the same length in every sequence are of one *kind*.
The packers work on the number of examples of each kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxbucket.base.length_counts import LengthCounts
from jaxbucket.base.sizes import Sizes, checked_size, row_keys


def row_shapes(max_seq_len: Any) -> tuple[int | Sizes, ...]:
    """Returns the T of rows, from `max_seq_len` of `pack`, in increasing order."""
    is_one = isinstance(max_seq_len, Mapping) or np.ndim(max_seq_len) == 0
    given = [max_seq_len] if is_one else list(max_seq_len)
    shapes = sorted({checked_size("max_seq_len", shape) for shape in given})
    sizes = [shape for shape in shapes if isinstance(shape, Sizes)]
    if not shapes or not all(sizes[-1].holds(x) for x in sizes):
        raise ValueError(
            f"`max_seq_len={max_seq_len!r}` must be T, or several of them. For several "
            "sequences, one shape must have the longest T of all."
        )
    return tuple(shapes)


def count_kinds(
    lengths: np.ndarray, capacities: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the sorted kinds, `[V, Q]` int32, and the number of examples of each.

    Example:
      >>> count_kinds(np.array([[3, 1], [2, 5], [3, 1]]), capacities=[8, 8])
      (array([[2, 5],
             [3, 1]], dtype=int32), array([1, 2]))
    """
    if lengths.shape[1] == 1:
        counted = LengthCounts(lengths[:, 0])
        return counted.lengths[:, None].astype(np.int32), counted.counts
    _, first, counts = np.unique(
        row_keys(lengths, capacities), return_index=True, return_counts=True
    )
    return lengths[first].astype(np.int32), counts


def group_kinds(
    kinds: np.ndarray, counts: np.ndarray, capacities: Sequence[int], max_groups: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Merges kinds into at most `max_groups` groups by rounding lengths up.

    Lengths are rounded up to a multiple of 1, 2, 4, ..., but not beyond the capacity.
    So every kind of a group fits where the lengths of the group fit.

    Example:
      >>> kinds, counts = np.array([[1, 1], [2, 2], [5, 1]]), np.array([1, 2, 1])
      >>> group_kinds(kinds, counts, capacities=[8, 8], max_groups=2)
      (array([[2, 2],
             [6, 2]], dtype=int32), array([3, 1]), array([0, 1, 2]))

    Args:
      kinds: `[V, Q]` lengths of the sequences of each kind.
      counts: `[V]` integers, the number of examples of each kind.
      capacities: `[Q]` integers, the tokens of each sequence that a row can hold.
      max_groups: the maximum number of groups.

    Returns:
      `[G, Q]` int32 lengths of the groups; `[G]` int64 numbers of examples; `[V]` kinds
      sorted by group.
    """
    step, rounded, group = 1, kinds, np.arange(len(kinds))
    while len(rounded) > max_groups:
        step *= 2
        up = np.minimum(-(-kinds // step) * step, capacities)
        _, first, group = np.unique(
            row_keys(up, capacities), return_index=True, return_inverse=True
        )
        rounded = up[first].astype(np.int32)
    sizes = np.bincount(group, counts, len(rounded)).astype(np.int64)
    return rounded, sizes, np.argsort(group, kind="stable")
