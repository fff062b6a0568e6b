"""The lengths of two sequences that a cost or a budget names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def two_lengths(
    function: Any, names: tuple[str, str], seq_lens: Mapping[str, int]
) -> tuple[int, int]:
    """Returns the T of two sequences.

    Args:
      function: the cost or the budget, for messages.
      names: the names of the two sequences.
      seq_lens: sequence name -> T.

    Raises:
      ValueError: if the two are the same, or examples do not have both.
    """
    known = sorted(seq_lens) if isinstance(seq_lens, Mapping) else []
    if len(set(names).intersection(known)) < 2:
        raise ValueError(
            f"`{type(function).__name__}` requires the sequences {list(names)}, but "
            f"examples have {known}. Pass the names of two sequences"
        )
    return seq_lens[names[0]], seq_lens[names[1]]
