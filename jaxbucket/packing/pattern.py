"""Rows that are alike: what packers of a histogram find."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Pattern:
    """Rows that are alike.

    Attributes:
      slots: their lengths, the longest first.
      rows: how many there are.
      seq_len: T that they were begun with.
    """

    slots: tuple[int, ...]
    rows: int
    seq_len: int


def positions(patterns: Iterable[Pattern]) -> int:
    """Returns how many there are in all rows, padding counted."""
    return sum(pattern.rows * pattern.seq_len for pattern in patterns)
