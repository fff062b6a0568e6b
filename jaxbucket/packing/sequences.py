"""Examples with several sequences, each with its own lengths and its own capacity.

For example, a row may have room for 512 tokens of inputs and, separately, for 128
tokens of targets. Examples with the same length in every sequence are of one *kind*.
The packers work on the number of examples of each kind.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from jaxbucket.base.sizes import Sizes, check_same_sequences
from jaxbucket.plan.histogram import value_counts

# Packers store a bit for every position of a row, or several numbers if a row has
# several sequences.
MAX_ROW = 1 << 26
MAX_CAPACITY = 1 << 20


def check_shapes(max_seq_len: Any, names: Collection[str]) -> tuple[Sizes, ...]:
    """Returns the tokens of each sequence that the rows of each shape can hold.

    Args:
      max_seq_len: sequence name -> tokens, or several such mappings.
      names: the names of the sequences of the examples.

    Raises:
      ValueError: if there is no shape, a size is not positive or too large, the names
        are others, or the shapes are not increasing: each with a larger sum, and the
        last one the longest in every sequence.
    """
    given = [max_seq_len] if isinstance(max_seq_len, Mapping) else list(max_seq_len)
    if not given or not all(isinstance(shape, Mapping) for shape in given):
        raise ValueError(
            f"`max_seq_len={max_seq_len!r}` must be a mapping from sequence name to "
            "tokens, or several of them."
        )
    shapes = [Sizes(shape, "max_seq_len") for shape in given]
    for shape in shapes:
        check_same_sequences("max_seq_len", shape, names, "the lengths have")
    totals = [shape.total for shape in shapes]
    if sorted(set(totals)) != totals or not all(map(shapes[-1].holds, shapes)):
        raise ValueError(
            f"`max_seq_len` has the shapes {shapes}. Pass them by increasing sum, the "
            "last one with the longest T of every sequence."
        )
    if max(shapes[-1].values()) > MAX_CAPACITY:
        raise ValueError(
            f"`max_seq_len={shapes[-1]!r}` exceeds {MAX_CAPACITY}. Use shorter rows."
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

    Args:
      lengths: `[N, Q]` positive integers, at most `capacities`.
      capacities: `[Q]` integers, the tokens of each sequence that a row can hold.
    """
    if lengths.shape[1] == 1:
        values, counts = value_counts(lengths[:, 0])
        return values[:, None].astype(np.int32), counts
    _, first, counts = np.unique(
        _lexicographic_keys(lengths, capacities), return_index=True, return_counts=True
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
            _lexicographic_keys(up, capacities), return_index=True, return_inverse=True
        )
        rounded = up[first].astype(np.int32)
    sizes = np.bincount(group, counts, len(rounded)).astype(np.int64)
    return rounded, sizes, np.argsort(group, kind="stable")


def _lexicographic_keys(lengths: np.ndarray, capacities: Sequence[int]) -> np.ndarray:
    """Returns `[N]` integers that compare like the rows of lengths, `[N, Q]`."""
    if math.prod(size + 1 for size in capacities) < 2**63:
        keys = np.zeros(len(lengths), np.int64)
        for column, size in enumerate(capacities):
            keys = keys * (size + 1) + lengths[:, column]
        return keys
    return np.unique(lengths, axis=0, return_inverse=True)[1].reshape(-1)
