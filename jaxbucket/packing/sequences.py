"""Examples with several sequences, each with its own lengths and its own capacity.

For example, a row may have room for 512 tokens of inputs and, separately, for 128
tokens of targets. Examples with the same length in every sequence are of one *kind*.
The packers work on the number of examples of each kind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxbucket.base.checks import check_positive

# Packers store a bit for every position of a row, or several numbers if a row has
# several sequences.
MAX_ROW = 1 << 26
MAX_CAPACITY = 1 << 20


def check_capacities(
    capacities: Any, parts: Mapping[str, np.ndarray] | None = None
) -> dict[str, int]:
    """Returns the tokens of each sequence that a row can hold.

    Args:
      capacities: sequence name -> tokens.
      parts: sequence name -> `[N]` lengths, which must fit. The result has the order of
        `parts`, or is sorted by name if `parts` is None.

    Raises:
      ValueError: if there is no capacity, one is not positive, the names differ from
        those of `parts`, or an example is longer than a capacity.
    """
    if not isinstance(capacities, Mapping):
        raise ValueError(
            f"`capacities={capacities!r}` is not a mapping. Pass the tokens of each "
            'sequence that a row can hold, such as {"inputs": 512, "targets": 128}.'
        )
    if parts is None:
        parts = dict.fromkeys(sorted(capacities), np.zeros(0, np.int32))
    if capacities.keys() != parts.keys() or not capacities:
        raise ValueError(
            f"The capacities have the sequences {sorted(capacities)}, but the lengths "
            f"have {sorted(parts)}. Pass the same sequences, and at least one."
        )
    checked = {}
    for name, column in parts.items():
        argument = f"max_seq_len[{name!r}]"
        checked[name] = capacity = check_positive(argument, capacities[name])
        if capacity > MAX_CAPACITY:
            raise ValueError(
                f"`{argument}={capacity}` exceeds {MAX_CAPACITY}. Use shorter rows."
            )
        if np.any(column > capacity):
            example = int(np.argmax(column > capacity))
            raise ValueError(
                f"`lengths[{name!r}][{example}]={column[example]}` exceeds the "
                f"capacity of a row, `{argument}={capacity}`. Raise the capacity, or "
                "pass `overlong='drop'` or 'truncate' here and to the plan."
            )
    return checked


def check_shapes(
    max_seq_len: Any, parts: Mapping[str, np.ndarray] | None = None
) -> tuple[dict[str, int], ...]:
    """Returns the tokens of each sequence that the rows of each shape can hold.

    Args:
      max_seq_len: sequence name -> tokens, or several such mappings.
      parts: sequence name -> `[N]` lengths, which must fit the last shape.

    Raises:
      ValueError: if `check_capacities` refuses a shape, or several are not increasing:
        each with a larger sum, and the last one the longest in every sequence.
    """
    if isinstance(max_seq_len, Mapping):
        return (check_capacities(max_seq_len, parts),)
    empty = None if parts is None else {x: y[:0] for x, y in parts.items()}
    shapes = [check_capacities(x, empty) for x in max_seq_len]
    if not shapes:
        raise ValueError("`max_seq_len` is empty. Pass the T of at least one row.")
    totals = [sum(shape.values()) for shape in shapes]
    longest = {x: max(shape[x] for shape in shapes) for x in shapes[-1]}
    if sorted(set(totals)) != totals or shapes[-1] != longest:
        raise ValueError(
            f"`max_seq_len` has the shapes {shapes}. Pass them by increasing sum, the "
            "last one with the longest T of every sequence."
        )
    check_capacities(shapes[-1], parts)
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
