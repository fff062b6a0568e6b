"""Patterns, groups of identical rows that packers of a histogram produce."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Generic, TypeVar

Room = TypeVar("Room")


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A group of identical rows.

    Attributes:
      slots: the lengths of the slots, the longest first; or their kinds, if examples
        have several sequences.
      rows: the number of rows.
      seq_len: the T of the rows.
    """

    slots: tuple[int, ...]
    rows: int
    seq_len: int


def positions(patterns: Iterable[Pattern]) -> int:
    """Returns the number of positions in all rows, padding included."""
    return sum(pattern.rows * pattern.seq_len for pattern in patterns)


@dataclasses.dataclass(slots=True, eq=False)
class OpenRows(Generic[Room]):
    """A group of rows that are identical so far and may be filled further.

    The slots are a linked list: the slots of `before`, followed by `times` copies of
    `slot`.

    Attributes:
      seq_len: the T of the rows.
      room: the room that is left in each row.
      number: the number of rows.
      segments: the number of slots in each row.
      before: the rows before the last slots were added; None if there are no slots.
      slot: the length or kind of the last slots.
      times: the number of these last slots.
    """

    seq_len: int
    room: Room
    number: int
    segments: int = 0
    before: OpenRows[Room] | None = None
    slot: int = 0
    times: int = 0

    def take(self, slot: int, times: int, room: Room, number: int) -> OpenRows[Room]:
        """Splits off `number` rows and adds `times` slots to each of them."""
        self.number -= number
        segments = self.segments + times
        return OpenRows(self.seq_len, room, number, segments, self, slot, times)

    def pattern(self) -> Pattern:
        """Returns the pattern of these rows."""
        parts = []
        rows: OpenRows[Room] | None = self
        while rows is not None and rows.segments:
            parts.append((rows.slot,) * rows.times)
            rows = rows.before
        slots = tuple(slot for part in reversed(parts) for slot in part)
        return Pattern(slots, self.number, self.seq_len)
