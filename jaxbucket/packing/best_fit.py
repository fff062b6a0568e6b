"""Best fit decreasing on a histogram: the longest first, each into the fullest row.

All examples of a length are packed together, so the time depends on the number of
distinct lengths and not on the number of examples. Krell et al., "Efficient Sequence
Packing without Cross-contamination", 2021, arXiv:2107.02027, also pack a histogram.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

from jaxbucket.packing.pattern import OpenRows, Pattern


def best_fit(
    values: np.ndarray, counts: np.ndarray, seq_lens: Sequence[int], cap: int
) -> list[Pattern]:
    """Returns the rows of best fit decreasing.

    Args:
      values: `[V]` distinct lengths, increasing, at most the last of `seq_lens`.
      counts: `[V]` integers, the number of examples of each length.
      seq_lens: the possible T of a row, increasing.
      cap: the maximum number of slots in a row.
    """
    packed: list[OpenRows[int]] = []
    rooms = _Rooms(cap)
    starts = np.searchsorted(seq_lens, values[::-1]).tolist()
    columns = values[::-1].tolist(), counts[::-1].tolist(), starts
    for length, left, start in zip(*columns, strict=True):
        while left:
            rows = rooms.take_tightest(length)
            if rows is None:
                rows = OpenRows(seq_lens[start], seq_lens[start], left)
            # A row that took an example remains the tightest until no more fit.
            times = min(rows.room // length, cap - rows.segments, left)
            number = min(rows.number, left // times)
            fuller = rows.take(length, times, rows.room - times * length, number)
            packed.append(fuller)
            if rows.number and rows.segments:
                rooms.put(rows)
            rooms.put(fuller)
            left -= number * times
    return [rows.pattern() for rows in packed if rows.number]


class _Rooms:
    """Rows with room for more examples, indexed by their room."""

    def __init__(self, cap: int):
        self._cap = cap
        self._by_room: dict[int, list[OpenRows[int]]] = {}
        # The sorted keys of `_by_room`. They are few, even if rows are very long.
        self._rooms: list[int] = []

    def take_tightest(self, length: int) -> OpenRows[int] | None:
        """Removes and returns the rows with the least room that a length fits.

        Of several groups of rows with this room, returns the one added last.
        """
        index = bisect.bisect_left(self._rooms, length)
        if index == len(self._rooms):
            return None
        room = self._rooms[index]
        rows = self._by_room[room]
        tightest = rows.pop()
        if not rows:
            del self._by_room[room], self._rooms[index]
        return tightest

    def put(self, rows: OpenRows[int]) -> None:
        if rows.room and rows.segments < self._cap:
            if rows.room not in self._by_room:
                self._by_room[rows.room] = []
                bisect.insort(self._rooms, rows.room)
            self._by_room[rows.room].append(rows)
