"""Rows that are alike: what packers of a histogram find."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Generic, TypeVar

Room = TypeVar("Room")


@dataclasses.dataclass(frozen=True)
class Pattern:
    """Rows that are alike.

    Attributes:
      slots: their lengths, the longest first; their kinds, where examples have several
        sequences.
      rows: how many there are.
      seq_len: T that they were begun with.
    """

    slots: tuple[int, ...]
    rows: int
    seq_len: int


def positions(patterns: Iterable[Pattern]) -> int:
    """Returns how many there are in all rows, padding counted."""
    return sum(pattern.rows * pattern.seq_len for pattern in patterns)


@dataclasses.dataclass(slots=True, eq=False)
class OpenRows(Generic[Room]):
    """Rows that are alike so far: those `before` them, with more of one slot.

    Attributes:
      seq_len: T that they were begun with.
      room: what is left in each of them.
      number: how many there are.
      segments: slots in each of them.
      before: the rows that they were, if they have a slot.
      slot: a length, or a kind.
      times: how many of it came last.
    """

    seq_len: int
    room: Room
    number: int
    segments: int = 0
    before: OpenRows[Room] | None = None
    slot: int = 0
    times: int = 0

    def take(self, slot: int, times: int, room: Room, number: int) -> OpenRows[Room]:
        """Splits off a number of these rows, to each of which so many slots go."""
        self.number -= number
        segments = self.segments + times
        return OpenRows(self.seq_len, room, number, segments, self, slot, times)

    def pattern(self) -> Pattern:
        parts = []
        rows: OpenRows[Room] | None = self
        while rows is not None and rows.segments:
            parts.append((rows.slot,) * rows.times)
            rows = rows.before
        slots = tuple(slot for part in reversed(parts) for slot in part)
        return Pattern(slots, self.number, self.seq_len)
