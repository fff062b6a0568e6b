"""Best fit decreasing where rows have a room for each of several sequences.

Examples whose sequences are all as long as another's are of one *kind*. The kind that
needs the largest share of any room is first; all examples of it at once go into the
rows with the least room for one sequence, and then for the others.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import operator
from collections.abc import Iterator, Sequence

import numpy as np

# Rows that are looked at for one example, of those with the least room. Two sequences
# need one: the tree knows whether it is there.
_MOST_TRIED = 64
# Shares of a row are counted in these; their squares add up in 64 bits.
_WHOLE = 1 << 20


@dataclasses.dataclass(frozen=True)
class KindPattern:
    """Rows that are alike.

    Attributes:
      kinds: those of their slots.
      rows: how many there are.
    """

    kinds: tuple[int, ...]
    rows: int


def fit_sequences(
    kinds: np.ndarray, counts: np.ndarray, capacities: Sequence[int], cap: int
) -> list[KindPattern]:
    """Returns the rows.

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
    every: list[_Rows] = []
    largest = np.lexsort((-shares.sum(axis=1), -shares.max(axis=1)))
    for kind in largest.tolist():
        need, left = needs[kind], int(counts[kind])
        while left:
            rows = rooms.take_tightest(need) or _Rows(None, -1, 0, whole, 0, left)
            times = min(cap - rows.segments, left)
            if times > 1:
                fits = map(operator.floordiv, rows.rooms, need)
                times = min(times, *fits)
            number = min(rows.number, left // times)
            after = tuple(
                [room - times * n for room, n in zip(rows.rooms, need, strict=True)]
            )
            every.append(_Rows(rows, kind, times, after, rows.segments + times, number))
            rows.number -= number
            if rows.number and rows.segments:
                rooms.put(rows)
            rooms.put(every[-1])
            left -= number * times
    return [KindPattern(rows.kinds(), rows.number) for rows in every if rows.number]


def shares_of(
    kinds: np.ndarray, capacities: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns `[V, Q]` how much of a row sequences fill, and `[Q]` a whole row.

    In integers, which are the same on every machine.
    """
    sizes = np.array(capacities, np.int64)
    return kinds.astype(np.int64) * _WHOLE // sizes, np.full(len(sizes), _WHOLE)


@dataclasses.dataclass(slots=True, eq=False)
class _Rows:
    """Rows that are alike so far: those before them, and `times` more of a kind."""

    before: _Rows | None
    kind: int
    times: int
    rooms: tuple[int, ...]
    segments: int
    number: int

    def kinds(self) -> tuple[int, ...]:
        parts = []
        rows: _Rows | None = self
        while rows is not None and rows.segments:
            parts.append((rows.kind,) * rows.times)
            rows = rows.before
        return tuple(kind for part in reversed(parts) for kind in part)


def _rooms_of(rows: _Rows) -> tuple[int, ...]:
    return rows.rooms


class _Rooms:
    """Rows that may take more: a tree over the room for the first sequence.

    Each node knows the most room that rows below it have for every sequence, so that a
    search turns back where there is not enough.
    """

    def __init__(self, whole: tuple[int, ...], cap: int):
        self._whole = whole
        self._cap = cap
        self._leaves = 1 << whole[0].bit_length()
        self._rows: dict[int, list[_Rows]] = {}
        # Node 1 is the root, and 2 n and 2 n + 1 are below n; none has any room yet.
        self._most = [[-1] * (2 * self._leaves) for _ in whole]

    def put(self, rows: _Rows) -> None:
        if all(rows.rooms) and rows.segments < self._cap:
            own = self._rows.setdefault(rows.rooms[0], [])
            bisect.insort(own, rows, key=_rooms_of)
            self._update(rows.rooms[0])

    def take_tightest(self, need: list[int]) -> _Rows | None:
        """Takes out rows that have room for lengths, with the least for the first."""
        for leaf, place in itertools.islice(self._tight(need), _MOST_TRIED):
            own = self._rows[leaf]
            if place < len(own) and all(map(operator.ge, own[place].rooms, need)):
                tightest = own.pop(place)
                self._update(leaf)
                return tightest
        return None

    def _tight(self, need: list[int]) -> Iterator[tuple[int, int]]:
        """Rows that may fit, from those with the least room: their leaf and place."""
        leaf = self._next_leaf(need[0], need)
        while leaf is not None:
            own = self._rows[leaf]
            first = bisect.bisect_left(own, (leaf, *need[1:]), key=_rooms_of)
            # A leaf without any counts as well: looking there has taken its time.
            yield from (
                (leaf, place) for place in range(first, max(len(own), first + 1))
            )
            leaf = self._next_leaf(leaf + 1, need)

    def _next_leaf(self, leaf: int, need: list[int]) -> int | None:
        """The least room for the first sequence, from one on, where rows may fit."""
        # A leaf says itself what room there is for the first.
        most = self._most[-1 if len(need) < 3 else 1]
        least, others = need[-1 if len(need) < 3 else 1], range(2, len(need))
        node = leaf + self._leaves
        while node < 2 * self._leaves:
            if most[node] >= least and (
                not others or all(self._most[i][node] >= need[i] for i in others)
            ):
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

        Of rows that are sorted by their rooms, the first of which is the same for all,
        the last has the most room for the first two sequences. For others the whole
        room stands, which is no less.
        """
        rows = self._rows[leaf]
        for index, own in enumerate(self._most):
            most = -1
            if rows:
                most = self._whole[index] if index > 1 else rows[-1].rooms[index]
            node = leaf + self._leaves
            own[node] = most
            while node > 1:
                beside = own[node ^ 1]
                if beside > most:
                    most = beside
                node >>= 1
                if own[node] == most:
                    break
                own[node] = most
