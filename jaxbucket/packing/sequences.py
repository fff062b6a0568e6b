"""Examples of several sequences, each with lengths and a capacity in a row of its own.

Such as inputs and targets: a row has room for 512 tokens of the ones and for 128 of the
others, beside each other. Its T is the sum, 640, so that budgets, padding and costs
count what they always do. Examples whose sequences are all as long as another's are of
one *kind*: packers count these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.checks import check_lengths, check_positive

# Packers keep something for each token that a row may have: a bit; or numbers, where it
# has several sequences.
MAX_ROW = 1 << 26
_MAX_CAPACITY = 1 << 20


def check_parts(lengths: Mapping[str, ArrayLike]) -> dict[str, np.ndarray]:
    """Returns the lengths `[N]` of each sequence, in the order of their names.

    Raises:
      ValueError: if there is none, one of them is what `check_lengths` refuses, or
        they are of different numbers of examples.
    """
    other = [name for name in lengths if not isinstance(name, str)]
    if other:
        raise ValueError(
            f"`lengths` are of sequences {other}: name them by strings, as features of "
            "examples are."
        )
    parts = {}
    for name in sorted(lengths):
        try:
            parts[name] = check_lengths(lengths[name])
        except ValueError as error:
            raise ValueError(f"Of the sequence {name!r}: {error}") from None
    sizes = {name: len(column) for name, column in parts.items()}
    if not parts:
        raise ValueError("`lengths` has no sequence: give the lengths of one at least.")
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"`lengths` are of different numbers of examples, {sizes}: give each "
            "sequence one length for every example."
        )
    return parts


def check_capacities(
    capacities: Any, parts: Mapping[str, np.ndarray] | None = None
) -> dict[str, int]:
    """Returns what a row holds of each sequence.

    Args:
      capacities: name -> tokens.
      parts: name -> `[N]` lengths, which must fit, in the order that is returned.

    Raises:
      ValueError: if they are none or not positive, or of other sequences than `parts`,
        or an example is longer.
    """
    if not isinstance(capacities, Mapping):
        raise ValueError(
            f"`capacities={capacities!r}`: give what a row holds of each sequence, "
            'such as {"inputs": 512, "targets": 128}.'
        )
    if parts is None:
        parts = dict.fromkeys(sorted(capacities), np.zeros(0, np.int32))
    if capacities.keys() != parts.keys() or not capacities:
        raise ValueError(
            f"There are capacities of {sorted(capacities)}, and lengths of "
            f"{sorted(parts)}: name the same sequences."
        )
    checked = {}
    for name, column in parts.items():
        argument = f"max_seq_len[{name!r}]"
        checked[name] = capacity = check_positive(argument, capacities[name])
        if capacity > _MAX_CAPACITY:
            raise ValueError(
                f"`{argument}={capacity}` is beyond {_MAX_CAPACITY}: give shorter rows."
            )
        if np.any(column > capacity):
            example = int(np.argmax(column > capacity))
            raise ValueError(
                f"`lengths[{name!r}][{example}]={column[example]}` is beyond the "
                f"capacity of a row, `{argument}={capacity}`. Raise it, or leave such "
                "examples out."
            )
    return checked


def total_lengths(parts: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns the tokens `[N]` of all sequences of an example.

    Example:
      >>> total_lengths({"inputs": np.array([3, 5]), "targets": np.array([1, 2])})
      array([4, 7])
    """
    return check_lengths(sum(x.astype(np.int64) for x in parts.values()))


def kinds_of(
    lengths: np.ndarray, capacities: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the kinds, `[V, Q]` int32 in order, and how many examples have each.

    Example:
      >>> kinds_of(np.array([[3, 1], [2, 5], [3, 1]]), capacities=[8, 8])
      (array([[2, 5],
             [3, 1]], dtype=int32), array([1, 2]))

    Args:
      lengths: `[N, Q]` positive integers, at most `capacities`.
      capacities: `[Q]` what a row holds of each sequence.
    """
    _, first, counts = np.unique(
        _numbers(lengths, capacities), return_index=True, return_counts=True
    )
    return lengths[first].astype(np.int32), counts


def grouped_kinds(
    kinds: np.ndarray, counts: np.ndarray, capacities: Sequence[int], most: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns groups of kinds, so many at most, as long as their longest may be.

    Lengths are rounded up to a multiple, 1, 2, 4, ..., or to all that a row holds.

    Example:
      >>> kinds, counts = np.array([[1, 1], [2, 2], [5, 1]]), np.array([1, 2, 1])
      >>> grouped_kinds(kinds, counts, capacities=[8, 8], most=2)
      (array([[2, 2],
             [6, 2]], dtype=int32), array([3, 1]), array([0, 1, 2]))

    Args:
      kinds: `[V, Q]`.
      counts: `[V]` examples of each.
      capacities: `[Q]` what a row holds of each sequence.
      most: groups there may be.

    Returns:
      `[G, Q]` int32 lengths; `[G]` examples of each; `[V]` the kinds of the first
      group, then those of the next.
    """
    step, rounded, group = 1, kinds, np.arange(len(kinds))
    while len(rounded) > most:
        step *= 2
        up = np.minimum(-(-kinds // step) * step, capacities)
        _, first, group = np.unique(
            _numbers(up, capacities), return_index=True, return_inverse=True
        )
        rounded = up[first].astype(np.int32)
    number = np.bincount(group, counts, len(rounded)).astype(np.int64)
    return rounded, number, np.argsort(group, kind="stable")


def _numbers(lengths: np.ndarray, capacities: Sequence[int]) -> np.ndarray:
    """`[N]` numbers in the order of the lengths, the same where all lengths are."""
    if math.prod(size + 1 for size in capacities) < 2**63:
        numbers = np.zeros(len(lengths), np.int64)
        for column, size in enumerate(capacities):
            numbers = numbers * (size + 1) + lengths[:, column]
        return numbers
    return np.unique(lengths, axis=0, return_inverse=True)[1].reshape(-1)
