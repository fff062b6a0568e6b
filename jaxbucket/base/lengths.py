"""Lengths of examples that have several sequences, each with its own length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.checks import check_lengths
from jaxbucket.base.sizes import check_same_sequences, check_sequence_names

# One length per example, or one per example for each sequence by name.
Lengths: TypeAlias = ArrayLike | Mapping[str, ArrayLike]


def check_parts(lengths: Mapping[str, ArrayLike]) -> dict[str, np.ndarray]:
    """Returns the lengths `[N]` of each sequence, sorted by name.

    Raises:
      ValueError: if there are fewer than two sequences, a name is not a string,
        `check_lengths` refuses the lengths of a sequence, or the numbers of examples
        differ.
    """
    check_sequence_names("lengths", lengths)
    parts = {
        name: check_lengths(lengths[name], f"lengths[{name!r}]")
        for name in sorted(lengths)
    }
    sizes = {name: len(column) for name, column in parts.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"`lengths` has these numbers of examples: {sizes}. Pass one length per "
            "example for every sequence."
        )
    return parts


def lengths_matrix(lengths: Any, sequences: Sequence[str]) -> np.ndarray:
    """Returns the lengths of several sequences as one array, `[N, Q]`.

    Example:
      >>> lengths_matrix({"target": [1, 2], "source": [3, 5]}, ["source", "target"])
      array([[3, 1],
             [5, 2]])

    Args:
      lengths: sequence name -> `[N]` integers; or `[N, Q]` integers, with a column for
        each sequence in the order of `sequences`.
      sequences: the names of the Q sequences, sorted.

    Raises:
      ValueError: if the sequences of `lengths` are others, or `check_parts` raises it.
    """
    if isinstance(lengths, np.ndarray) and lengths.shape[1:] == (len(sequences),):
        lengths = dict(zip(sequences, lengths.T, strict=True))
    if not isinstance(lengths, Mapping):
        raise ValueError(
            f"`lengths` is a {type(lengths).__name__}. Pass a mapping from each of "
            f"{list(sequences)} to its lengths [N]."
        )
    check_same_sequences("lengths", lengths, sequences, "the plan has")
    return np.stack(list(check_parts(lengths).values()), axis=1)


def any_lengths(lengths: Any, sequences: Sequence[str]) -> np.ndarray:
    """Returns lengths of one sequence, `[N]`, or of several, `[N, Q]`.

    Args:
      lengths: `[N]` integers; or as for `lengths_matrix`.
      sequences: the names of several sequences; empty if examples have one length.

    Raises:
      ValueError: as `check_lengths` or `lengths_matrix`.
    """
    if sequences:
        return lengths_matrix(lengths, sequences)
    return check_lengths(lengths)


def total_lengths(lengths: np.ndarray) -> np.ndarray:
    """Returns the number of tokens of each example over all sequences, `[N]`.

    Example:
      >>> total_lengths(np.array([[3, 1], [5, 2]]))
      array([4, 7])

    Args:
      lengths: `[N]` lengths of one sequence, or `[N, Q]` of several.
    """
    if lengths.ndim == 1:
        return lengths
    return check_lengths(lengths.sum(axis=1, dtype=np.int64))
