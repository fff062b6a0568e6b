"""Examples of several sequences, each with lengths and a capacity in a row of its own.

Such as inputs and targets: a row has room for 512 tokens of the ones and for 128 of the
others, beside each other. Its T is the sum, 640, so that budgets, padding and costs
count what they always do.
"""

from __future__ import annotations

from collections.abc import Mapping
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
