"""Best fit decreasing for rows with separate room for each of several sequences.

Examples with the same length in every sequence are of one *kind*. The kinds with the
largest share of any capacity come first. All examples of a kind are packed together,
into the rows with the least room for the first sequence, ties broken by the others.
"""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np

from jaxbucket.base.permutation import permute
from jaxbucket.packing.pattern import OpenRows, Pattern
from jaxbucket.plan.flow.dominance import fits

# The tree of rows stores several numbers for every token of a row.
MAX_CAPACITY = 1 << 20
# The rows that are tried for one example, from the tightest. With two sequences the
# first one always fits, because the tree stores the room for both.
_MAX_TRIED = 64
# The integer that represents a whole row. Sums of its squares fit in 64 bits.
_WHOLE = 1 << 20


def fit_sequences(
    kinds: np.ndarray, counts: np.ndarray, shapes: np.ndarray, cap: int
) -> list[Pattern]:
    """Returns the rows of best fit decreasing, whose slots are kinds.

    A new row has the first shape that holds its first kind. Kinds that need the last
    shape come first, so smaller ones fill up the rows of any shape.

    Args:
      kinds: `[V, Q]` lengths of the sequences of each kind, which the last shape holds.
      counts: `[V]` integers, the number of examples of each kind.
      shapes: `[K, Q]` integers, the tokens of each sequence that a row can hold, by
        increasing sum.
      cap: the maximum number of slots in a row.
    """
    if shapes.max() > MAX_CAPACITY:
        raise ValueError(
            f"`max_seq_len={shapes.max()}` exceeds {MAX_CAPACITY}. Use shorter rows."
        )
    needed = fits(kinds, shapes).argmax(axis=1)
    shares = kinds.astype(np.int64) * _WHOLE // shapes[needed]
    # The sequence with the most distinct lengths comes first, because few rows have the
    # same room for it.
    order = sorted(range(shapes.shape[1]), key=lambda i: -len(np.unique(kinds[:, i])))
    needs = kinds[:, order].tolist()
    wholes = [tuple(shape) for shape in shapes[:, order].tolist()]
    rooms = _Rooms(wholes[-1], cap, (kinds[:, order] == 0).any(axis=0).tolist())
    packed: list[_Rows] = []
    largest = np.lexsort((-shares.sum(axis=1), -shares.max(axis=1), -needed))
    for kind in largest.tolist():
        need, left, whole = needs[kind], int(counts[kind]), wholes[needed[kind]]
        while left:
            rows = rooms.take_tightest(need) or OpenRows(sum(whole), whole, left)
            times = min(cap - rows.segments, left)
            if times > 1:
                pairs = zip(rows.room, need, strict=True)
                times = min(times, *(size // n for size, n in pairs if n))
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


_Rows: TypeAlias = OpenRows[tuple[int, ...]]
_room_of = operator.attrgetter("room")


class _Rooms:
    """Rows with room for more examples, in a tree over the room for the first sequence.

    Each node stores the maximum room for the second sequence among the rows below it,
    so that a search skips nodes without enough.

    Args:
      whole: the room of an empty row for each sequence.
      cap: the maximum number of slots in a row.
      optional: whether an example may lack each sequence, and so fit without room.
    """

    def __init__(self, whole: tuple[int, ...], cap: int, optional: list[bool]):
        self._cap = cap
        self._optional = optional
        self._leaves = 1 << whole[0].bit_length()
        self._rows: dict[int, list[_Rows]] = {}
        # Node 1 is the root, and the children of node n are 2 n and 2 n + 1. There are
        # no rows yet.
        self._most = [-1] * (2 * self._leaves)

    def put(self, rows: _Rows) -> None:
        has_room = all(map(operator.or_, map(bool, rows.room), self._optional))
        if has_room and rows.segments < self._cap:
            leaf = rows.room[0]
            bisect.insort(self._rows.setdefault(leaf, []), rows, key=_room_of)
            self._update(leaf)

    def take_tightest(self, need: list[int]) -> _Rows | None:
        """Removes and returns the rows with the least room that the lengths fit."""
        for leaf, place in itertools.islice(self._candidates(need), _MAX_TRIED):
            rows = self._rows[leaf]
            if place < len(rows) and all(map(operator.ge, rows[place].room, need)):
                tightest = rows.pop(place)
                self._update(leaf)
                return tightest
        return None

    def _candidates(self, need: list[int]) -> Iterator[tuple[int, int]]:
        """Yields the leaf and place of rows that may fit, from the tightest."""
        leaf = self._next_leaf(need[0], need[1])
        while leaf is not None:
            rows = self._rows[leaf]
            first = bisect.bisect_left(rows, (leaf, *need[1:]), key=_room_of)
            # A leaf without candidates counts as one, because visiting it takes time.
            for place in range(first, max(len(rows), first + 1)):
                yield leaf, place
            leaf = self._next_leaf(leaf + 1, need[1])

    def _next_leaf(self, leaf: int, least: int) -> int | None:
        """Returns the first leaf, from `leaf`, with room `least` for the second."""
        node = leaf + self._leaves
        while node < 2 * self._leaves:
            if self._most[node] >= least:
                if node >= self._leaves:
                    return node - self._leaves
                node *= 2
                continue
            # Go to the next subtree: up while the node is a right child, then right.
            while node & 1:
                node >>= 1
            if not node:
                break
            node += 1
        return None

    def _update(self, leaf: int) -> None:
        """Updates the nodes above a leaf after its rows have changed.

        All rows of a leaf have the same room for the first sequence, and they are
        sorted by room. So the last row has the most room for the second sequence.
        """
        rows = self._rows[leaf]
        most = rows[-1].room[1] if rows else -1
        node = leaf + self._leaves
        self._most[node] = most
        while node > 1:
            most = max(most, self._most[node ^ 1])
            node >>= 1
            if self._most[node] == most:
                break
            self._most[node] = most


# The examples to choose from. A larger pool fills rows better and takes longer.
_POOL_SIZE = 2048
# More examples would take over three seconds, and best fit would fill rows better.
_MAX_EXAMPLES = 100_000
_SEED = 0x5E9


def pooled_rows(
    kinds: np.ndarray,
    counts: np.ndarray,
    capacities: Sequence[int],
    cap: int,
    fewer_than: int,
) -> list[Pattern] | None:
    """Returns the rows, or None if there are too many examples or too many rows.

    Args:
      kinds: `[V, Q]` lengths of the sequences of each kind, at most `capacities`.
      counts: `[V]` integers, the number of examples of each kind.
      capacities: `[Q]` integers, the tokens of each sequence that a row can hold.
      cap: the maximum number of slots in a row.
      fewer_than: the packer gives up as soon as it needs at least this many rows.
    """
    pending = np.repeat(np.arange(len(counts)), counts)
    if len(pending) > _MAX_EXAMPLES:
        return None
    pending = pending[permute(np.arange(len(pending)), len(pending), _SEED)]
    # Integers make the results the same on every machine.
    shares = kinds.astype(np.int64) * _WHOLE // np.array(capacities)
    weights = _weights(kinds, counts, capacities).tolist()
    # `[2 * Q, V]` and `[2 * Q, pool]`: each length and share is a contiguous row.
    table = np.ascontiguousarray(np.concatenate([kinds, shares], axis=1).T)
    pool, rest = pending[:_POOL_SIZE].copy(), iter(pending[_POOL_SIZE:].tolist())
    columns = table[:, pool]
    tokens = (counts @ kinds.astype(np.int64)).tolist()
    patterns = []
    while len(pool):
        room, left = list(capacities), [_WHOLE] * len(capacities)
        row: list[int] = []
        while len(row) < cap and len(pool):
            index = _best_index(columns, room, left, weights)
            if index is None:
                break
            row.append(int(pool[index]))
            taken = columns[:, index].tolist()
            room = [x - n for x, n in zip(room, taken, strict=False)]
            left = [x - n for x, n in zip(left, taken[len(room) :], strict=True)]
            kind = next(rest, None)
            if kind is None:
                pool = np.delete(pool, index)
                columns = np.delete(columns, index, axis=1)
            else:
                pool[index] = kind
                columns[:, index] = table[:, kind]
        patterns.append(Pattern(tuple(row), 1, sum(capacities)))
        # The sequence that needs the most rows is a bound for the remaining examples.
        tokens = [n - (c - x) for n, c, x in zip(tokens, capacities, room, strict=True)]
        left_over = max(-(-n // c) for n, c in zip(tokens, capacities, strict=True))
        if len(patterns) + left_over >= fewer_than:
            return None
    return patterns


def _best_index(
    columns: np.ndarray, room: list[int], left: list[int], weights: list[int]
) -> int | None:
    """Returns the index in the pool that leaves the least room, or None if none fits.

    Args:
      columns: `[2 * Q, pool]` integers, the lengths followed by the shares of a row.
      room: `[Q]` integers, the tokens that are left in the row.
      left: `[Q]` integers, the shares that are left in the row.
      weights: `[Q]` integers, the weight of each sequence.
    """
    size = len(room)
    fits = columns[0] <= room[0]
    for index in range(1, size):
        fits &= columns[index] <= room[index]
    remaining = np.zeros(columns.shape[1], np.int64)
    for index, weight in enumerate(weights):
        share = left[index] - columns[size + index]
        share *= share
        share *= weight
        remaining += share
    remaining[~fits] = np.iinfo(np.int64).max
    index = int(remaining.argmin())
    return index if fits[index] else None


def _weights(
    kinds: np.ndarray, counts: np.ndarray, capacities: Sequence[int]
) -> np.ndarray:
    """Returns `[Q]` weights up to 1,024, proportional to the rows a sequence fills."""
    tokens = (counts @ kinds).tolist()
    rows = [-(-n // size) for n, size in zip(tokens, capacities, strict=True)]
    return np.array([-(-1024 * n // max(rows)) for n in rows])
