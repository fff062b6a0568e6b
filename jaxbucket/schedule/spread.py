"""Sequences in which every item keeps to its share of the positions.

`item_at` finds the item at a position of such a sequence, `occurrences` the counts
before it. `SpreadUpdates` spreads the buckets of a schedule over its steps, and `Turns`
the components of a mixture.
"""

from __future__ import annotations

import bisect
import functools
import heapq
import itertools
import math
import operator
from collections.abc import Sequence
from fractions import Fraction
from typing import TypeAlias

import numpy as np

# An item, or two groups of items.
_Group: TypeAlias = "int | tuple[_Node, _Node]"
# The total count of a group, and the group.
_Node: TypeAlias = tuple[int, _Group]


def item_at(position: int, counts: tuple[int, ...]) -> tuple[int, int]:
    """Returns the item at a position of a sequence with every item evenly spread.

    The sequence is divided between two groups of items in proportion to their counts,
    as Bresenham's line is between rows, and so is the part of each group, until every
    group is a single item. The groups are those of Huffman's code for the counts. So
    any position is found without the ones before it.

    In the first t of N positions, item k occurs t * counts[k] / N times, with an error
    of less than two, and typically less than one. The sequence can be repeated: its
    errors are those of an endless sequence.

    Example:
      >>> [item_at(position, (3, 0, 5, 1)) for position in range(5)]
      [(2, 0), (0, 0), (2, 1), (0, 1), (2, 2)]

    Args:
      position: an integer from 0, which may be beyond N: the sequence is repeated.
      counts: the number of occurrences of each item; N is their sum.

    Returns:
      The item, and the number of its earlier occurrences.
    """
    total, group = _huffman(counts)
    while not isinstance(group, int):
        first, second = group
        before, after = (_before(position + i, first[0], total) for i in range(2))
        if after > before:
            (total, group), position = first, before
        else:
            (total, group), position = second, position - before
    return group, position


def _before(position: int, count: int, total: int) -> int:
    """Returns how often the first of two groups occurs before a position."""
    # Half of the total is added so that the line starts in its middle.
    return (2 * position * count + total) // (2 * total)


def occurrences(position: int, counts: tuple[int, ...]) -> list[int]:
    """Returns how often each item occurs before a position of the same sequence.

    Example:
      >>> occurrences(4, (3, 0, 5, 1))
      [2, 0, 2, 0]

    Args:
      position, counts: as for `item_at`.
    """
    result = [0] * len(counts)
    pending = [(_huffman(counts), position)]
    while pending:
        (total, group), number = pending.pop()
        if isinstance(group, int):
            result[group] = number
            continue
        first, second = group
        before = _before(number, first[0], total)
        pending += [(first, before), (second, number - before)]
    return result


@functools.lru_cache(maxsize=64)
def _huffman(counts: tuple[int, ...]) -> _Node:
    """Returns a binary tree of the items, in which frequent items have short paths.

    The share of a group in the group two levels up is at most a half, so that errors
    do not add up along a path (Huffman, 1952).
    """
    nodes: list[tuple[int, int, _Group]] = [
        (count, item, item) for item, count in enumerate(counts) if count
    ]
    heapq.heapify(nodes)
    # Of equal counts, older groups come first; groups themselves are not compared.
    age = len(counts)
    while len(nodes) > 1:
        low, _, rare = heapq.heappop(nodes)
        high, _, frequent = heapq.heappop(nodes)
        group = ((high, frequent), (low, rare))
        heapq.heappush(nodes, (low + high, age, group))
        age += 1
    return (nodes[0][0], nodes[0][2]) if nodes else (0, 0)


class SpreadUpdates:
    """Divides the batches of an epoch between updates with the same mix of buckets.

    All batches, sorted by bucket, are cut into as many parts as an update has batches.
    An update takes one batch of each part: the first update the shortest one of the
    first part, the longest one of the second part, the shortest one of the third, and
    so on, and each later update those next to them (stratified and antithetic sampling,
    Hammersley and Handscomb, 1964, chapter 5). Updates of the same buckets are then
    spread evenly by `item_at`. So any position is found without the ones before it.

    With one batch in each update, this is `item_at`.

    Example: the short batches (0) are in updates with long ones (2).
      >>> updates = SpreadUpdates(np.array([2, 4, 2]), size=2)
      >>> [updates.at(position)[0] for position in range(8)]
      [1, 1, 0, 2, 1, 1, 0, 2]

    Args:
      counts: `[K]` integers, the number of batches of each bucket, the shortest first.
      size: the number of batches in an update.
      head: the number of batches before the first whole update.

    Attributes:
      num_updates: the number of whole updates.
    """

    def __init__(self, counts: np.ndarray, size: int, head: int = 0):
        total = int(counts.sum())
        self._size, self._head = size, min(head, total)
        tail = (total - self._head) % size
        first = _quantiles(counts, self._head)
        counts = counts - np.bincount(first, minlength=len(counts))
        last = _quantiles(counts, tail)
        counts = counts - np.bincount(last, minlength=len(counts))
        # The batches that are not in a whole update, and their numbers.
        self._others = np.concatenate([first, last])
        in_first = np.bincount(first, minlength=len(counts))
        earlier = np.concatenate([_earlier(first), _earlier(last) + in_first[last]])
        self._other_numbers = counts[self._others] + earlier
        ends = np.cumsum(counts)
        self._ends: list[int] = [0, *ends.tolist()]
        self.num_updates = int(counts.sum()) // size
        # The number of updates of each combination, and the first of them.
        places = ends - self.num_updates * np.arange(size)[:, None]
        places[1::2] = self.num_updates - places[1::2]
        inner = places[(places > 0) & (places < self.num_updates)]
        borders = np.unique([0, *inner.tolist(), self.num_updates])
        self._counts = tuple(np.diff(borders).tolist())
        self._firsts: list[int] = borders.tolist()

    def at(self, position: int, start: int = 0) -> tuple[int, int]:
        """Returns the bucket at a position.

        Args:
          position: an integer, below the sum of `counts`.
          start: the update that comes first.

        Returns:
          The bucket, and the number of its batch: different numbers from 0 to
          `counts[k] - 1` for bucket k.
        """
        whole, place = self.num_updates * self._size, position - self._head
        if not 0 <= place < whole:
            other = position if place < 0 else position - whole
            return int(self._others[other]), int(self._other_numbers[other])
        update, part = divmod(place, self._size)
        kind, number = item_at((update + start) % self.num_updates, self._counts)
        step = self._firsts[kind] + number
        if part % 2:
            step = self.num_updates - 1 - step
        batch = self.num_updates * part + step
        bucket = bisect.bisect_right(self._ends, batch) - 1
        return bucket, batch - self._ends[bucket]


@functools.lru_cache(maxsize=64)
def spread_updates(counts: tuple[int, ...], size: int, head: int) -> SpreadUpdates:
    """Returns `SpreadUpdates`, which takes longer to create than to use once."""
    return SpreadUpdates(np.array(counts, np.int64), size, head)


def _earlier(buckets: np.ndarray) -> np.ndarray:
    """Returns how often each of several sorted buckets has occurred before."""
    return np.arange(len(buckets)) - np.searchsorted(buckets, buckets)


def _quantiles(counts: np.ndarray, number: int) -> np.ndarray:
    """Returns the buckets of `[number]` batches at equal distances in sorted order."""
    ends = np.cumsum(counts)
    places = (2 * np.arange(number) + 1) * ends[-1] // max(1, 2 * number)
    return np.searchsorted(ends, places, side="right")


class Turns:
    """The sequence of `item_at` with shares that change. Members go on where they were.

    In a `Mixture`, the members are its components, and a turn is one of their steps.

    Example:
      >>> half, quarter = Fraction(1, 2), Fraction(1, 4)
      >>> turns = Turns([0, 4], [[half, half], [1 - quarter, quarter]])
      >>> [turns.at(turn) for turn in range(8)]
      [(1, 0), (0, 0), (1, 1), (0, 1), (0, 2), (0, 3), (1, 2), (0, 4)]

    Args:
      starts: the turns from which the shares hold, ascending from 0.
      shares: for each of them, `[n]` numbers, of which some may be 0.
    """

    def __init__(self, starts: Sequence[int], shares: Sequence[Sequence[Fraction]]):
        self._starts = list(starts)
        self._counts = list(map(_whole, shares))
        # The number of turns of each member before each start.
        self._before = [[0] * len(shares[0])]
        for (start, end), counts in zip(
            itertools.pairwise(starts), self._counts, strict=False
        ):
            turns = occurrences(end - start, counts)
            self._before.append(list(map(operator.add, self._before[-1], turns)))

    def before(self, turn: int) -> list[int]:
        """Returns the number of turns of each member before a turn."""
        index = bisect.bisect_right(self._starts, turn) - 1
        since = occurrences(turn - self._starts[index], self._counts[index])
        return list(map(operator.add, self._before[index], since))

    def at(self, turn: int) -> tuple[int, int]:
        """Returns the member of a turn, and the number of its earlier turns."""
        index = bisect.bisect_right(self._starts, turn) - 1
        member, since = item_at(turn - self._starts[index], self._counts[index])
        return member, self._before[index][member] + since

    def until(self, member: int, count: int) -> int | None:
        """Returns the number of turns after which a member has had `count` >= 1.

        It is None if the member never has as many.
        """
        enough = self._starts[-1] + 1
        if not self._counts[-1][member] and self.before(enough)[member] < count:
            return None
        while self.before(enough)[member] < count:
            enough *= 2
        turns = range(enough)
        return bisect.bisect_left(turns, count, key=lambda x: self.before(x)[member])


def _whole(shares: Sequence[Fraction]) -> tuple[int, ...]:
    """Returns `[n]` integers in proportion to the shares."""
    common = math.lcm(*(share.denominator for share in shares))
    return tuple(int(share * common) for share in shares)
