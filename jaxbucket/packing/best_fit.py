"""Best fit decreasing, of a histogram: the longest first, each into the fullest row.

It is done for all examples of a length at once, so that it takes as long as there are
lengths, and not examples (Krell et al., "Efficient Sequence Packing without
Cross-contamination", 2021, arXiv:2107.02027, pack a histogram as well).
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from jaxbucket.packing.pattern import Pattern


def best_fit(
    values: np.ndarray, counts: np.ndarray, seq_lens: Sequence[int], cap: int
) -> list[Pattern]:
    """Returns the rows of best fit decreasing, all examples of a length at once.

    Args:
      values: `[V]` lengths, increasing, the last at most the last of `seq_lens`.
      counts: `[V]` how many examples of each there are.
      seq_lens: T of rows, increasing.
      cap: the most slots of a row.
    """
    every: list[_Rows] = []
    rooms = _Rooms(cap)
    starts = iter(np.searchsorted(seq_lens, values[::-1]).tolist())
    pairs = zip(values[::-1].tolist(), counts[::-1].tolist(), starts, strict=True)
    for length, left, start in pairs:
        while left:
            rows = rooms.take_tightest(length)
            if rows is None:
                rows = _Rows(None, 0, 0, seq_lens[start], 0, left)
            # A row that took one is the tightest again until no more fit.
            times = min(rows.room // length, cap - rows.segments, left)
            number = min(rows.number, left // times)
            room, segments = rows.room - times * length, rows.segments + times
            every.append(_Rows(rows, length, times, room, segments, number))
            rows.number -= number
            if rows.number and rows.segments:
                rooms.put(rows)
            rooms.put(every[-1])
            left -= number * times
    return [
        Pattern(rows.slots(), rows.number, rows.seq_len())
        for rows in every
        if rows.number
    ]


@dataclasses.dataclass(slots=True, eq=False)
class _Rows:
    """Rows that are alike so far: those before them, and `times` more of a length."""

    before: _Rows | None
    length: int
    times: int
    room: int
    segments: int
    number: int

    def _history(self) -> Iterator[_Rows]:
        rows: _Rows | None = self
        while rows is not None and rows.segments:
            yield rows
            rows = rows.before

    def slots(self) -> tuple[int, ...]:
        parts = [(x.length,) * x.times for x in self._history()]
        return tuple(length for part in reversed(parts) for length in part)

    def seq_len(self) -> int:
        return self.room + sum(x.length * x.times for x in self._history())


class _Rooms:
    """Rows that may take more, by the room that is left in them."""

    def __init__(self, cap: int):
        self._cap = cap
        self._by_room: dict[int, list[_Rows]] = {}
        # Increasing, those that rows have. However long rows are, they are few.
        self._rooms: list[int] = []

    def take_tightest(self, length: int) -> _Rows | None:
        """Takes out rows with the least room for a length, the last come first."""
        place = bisect.bisect_left(self._rooms, length)
        if place == len(self._rooms):
            return None
        room = self._rooms[place]
        rows = self._by_room[room]
        found = rows.pop()
        if not rows:
            del self._by_room[room], self._rooms[place]
        return found

    def put(self, rows: _Rows) -> None:
        if rows.room and rows.segments < self._cap:
            if rows.room not in self._by_room:
                self._by_room[rows.room] = []
                bisect.insort(self._rooms, rows.room)
            self._by_room[rows.room].append(rows)
