"""Best fit decreasing where rows have a room for each of several sequences.

Examples whose sequences are all as long as another's are of one *kind*. The kind that
needs the largest share of any room is first; all examples of it at once go into the
rows with the least room for one sequence, and then for the others.
"""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np

from jaxbucket.packing.pattern import OpenRows, Pattern

# Rows that are looked at for one example, of those with the least room. Two sequences
# need one: the tree knows whether it is there.
_MOST_TRIED = 64
# Shares of a row are counted in these; their squares add up in 64 bits.
_WHOLE = 1 << 20


def fit_sequences(
    kinds: np.ndarray, counts: np.ndarray, capacities: Sequence[int], cap: int
) -> list[Pattern]:
    """Returns the rows, whose slots are kinds.

    Args:
      kinds: `[V, Q]` lengths of the sequences of each kind, at most `capacities`.
      counts: `[V]` how many examples of each there are.
      capacities: `[Q]` what a row holds of each sequence.
      cap: the most slots of a row.
    """
    shares, _ = shares_of(kinds, capacities)
    # The one of many lengths is looked for first: few rows have the same room for it.
    order = sorted(range(len(capacities)), key=lambda i: -len(np.unique(kinds[:, i])))
    needs = kinds[:, order].tolist()
    whole = tuple(capacities[i] for i in order)
    rooms = _Rooms(whole, cap)
    packed: list[_Rows] = []
    largest = np.lexsort((-shares.sum(axis=1), -shares.max(axis=1)))
    for kind in largest.tolist():
        need, left = needs[kind], int(counts[kind])
        while left:
            rows = rooms.take_tightest(need) or OpenRows(sum(whole), whole, left)
            times = min(cap - rows.segments, left)
            if times > 1:
                times = min(times, *map(operator.floordiv, rows.room, need))
            number = min(rows.number, left // times)
            pairs = zip(rows.room, need, strict=True)
            room = tuple([size - times * n for size, n in pairs])
            fuller = rows.take(kind, times, room, number)
            packed.append(fuller)
            if rows.number and rows.segments:
                rooms.put(rows)
            rooms.put(fuller)
            left -= number * times
    return [rows.pattern() for rows in packed if rows.number]


def shares_of(
    kinds: np.ndarray, capacities: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns `[V, Q]` how much of a row sequences fill, and `[Q]` a whole row.

    In integers, which are the same on every machine.
    """
    sizes = np.array(capacities, np.int64)
    return kinds.astype(np.int64) * _WHOLE // sizes, np.full(len(sizes), _WHOLE)


_Rows: TypeAlias = OpenRows[tuple[int, ...]]
_room_of = operator.attrgetter("room")


class _Rooms:
    """Rows that may take more: a tree over the room for the first sequence.

    Each node knows the most room that rows below it have for the second one (for the
    first, if there is no other), so that a search turns back where there is not enough.
    """

    def __init__(self, whole: tuple[int, ...], cap: int):
        self._cap = cap
        self._second = min(1, len(whole) - 1)
        self._leaves = 1 << whole[0].bit_length()
        self._rows: dict[int, list[_Rows]] = {}
        # Node 1 is the root, and 2 n and 2 n + 1 are below n; none has any room yet.
        self._most = [-1] * (2 * self._leaves)

    def put(self, rows: _Rows) -> None:
        if all(rows.room) and rows.segments < self._cap:
            leaf = rows.room[0]
            bisect.insort(self._rows.setdefault(leaf, []), rows, key=_room_of)
            self._update(leaf)

    def take_tightest(self, need: list[int]) -> _Rows | None:
        """Takes out rows that have room for lengths, with the least for the first."""
        for leaf, place in itertools.islice(self._tight(need), _MOST_TRIED):
            rows = self._rows[leaf]
            if place < len(rows) and all(map(operator.ge, rows[place].room, need)):
                tightest = rows.pop(place)
                self._update(leaf)
                return tightest
        return None

    def _tight(self, need: list[int]) -> Iterator[tuple[int, int]]:
        """Rows that may fit, from those with the least room: their leaf and place."""
        leaf = self._next_leaf(need[0], need[self._second])
        while leaf is not None:
            rows = self._rows[leaf]
            first = bisect.bisect_left(rows, (leaf, *need[1:]), key=_room_of)
            # A leaf without any counts as well: looking there has taken its time.
            for place in range(first, max(len(rows), first + 1)):
                yield leaf, place
            leaf = self._next_leaf(leaf + 1, need[self._second])

    def _next_leaf(self, leaf: int, least: int) -> int | None:
        """The first leaf from one on where rows have the least room for the second."""
        node = leaf + self._leaves
        while node < 2 * self._leaves:
            if self._most[node] >= least:
                if node >= self._leaves:
                    return node - self._leaves
                node *= 2
                continue
            # On to what lies right of it: up while it is a right one, then beside it.
            while node & 1:
                node >>= 1
            if not node:
                break
            node += 1
        return None

    def _update(self, leaf: int) -> None:
        """Renews what the nodes above a leaf know of it.

        Rows of a leaf are sorted by their rooms, of which the first is the same for
        all: the last rows have the most room for the second sequence.
        """
        rows = self._rows[leaf]
        most = rows[-1].room[self._second] if rows else -1
        node = leaf + self._leaves
        self._most[node] = most
        while node > 1:
            most = max(most, self._most[node ^ 1])
            node >>= 1
            if self._most[node] == most:
                break
            self._most[node] = most
