"""Sequences in which every item keeps to its share of the positions.

`spread_evenly` finds the items at positions of such a sequence, for `SpreadUpdates`.
`occurrences` finds the counts before a position, for the `Turns` of a mixture.
"""

from __future__ import annotations

import functools
import heapq
from typing import TypeAlias

import numpy as np

# An item, or two groups of items.
_Group: TypeAlias = "int | tuple[_Node, _Node]"
# The total count of a group, and the group.
_Node: TypeAlias = tuple[int, _Group]


def spread_evenly(
    positions: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the items at given positions of a sequence with every item evenly spread.

    The sequence is divided between two groups of items in proportion to their counts,
    as Bresenham's line is between rows, and so is the part of each group, until every
    group is a single item. The groups are those of Huffman's code for the counts. So
    any position is found without the ones before it.

    In the first t of N positions, item k occurs t * counts[k] / N times, with an error
    of less than two, and typically less than one. The sequence can be repeated: its
    errors are those of an endless sequence.

    Example:
      >>> items, numbers = spread_evenly(np.arange(9), np.array([3, 0, 5, 1]))
      >>> items
      array([2, 0, 2, 0, 2, 3, 2, 0, 2])
      >>> numbers
      array([0, 0, 1, 1, 2, 0, 3, 2, 4])

    Args:
      positions: `[n]` integers from 0 to N - 1.
      counts: `[K]` integers, the number of occurrences of each item; N is their sum,
        and below 2**31.

    Returns:
      `[n]` int64, the item at each position, and `[n]` int64, its number of earlier
      occurrences.

    Raises:
      ValueError: if N is 2**31 or more.
    """
    if counts.sum() >= 2**31:
        raise ValueError(
            f"{counts.sum():,} steps per epoch are too many for `order='spread'`, "
            "which supports fewer than 2**31. Raise `max_tokens`, or use 'shuffled'."
        )
    items = np.zeros(len(positions), np.int64)
    numbers = np.array(positions, np.int64)
    pending = [(_huffman(tuple(counts.tolist())), np.arange(len(positions)))]
    while pending:
        (total, group), places = pending.pop()
        if not len(places):
            continue
        if isinstance(group, int):
            items[places] = group
            continue
        first, second = group
        # Half the difference is added so that the line starts in its middle.
        doubled = 2 * numbers[places] * first[0] + total
        before = doubled // (2 * total)
        is_first = (doubled + 2 * first[0]) // (2 * total) > before
        numbers[places] = np.where(is_first, before, numbers[places] - before)
        pending += [(first, places[is_first]), (second, places[~is_first])]
    return items, numbers


def occurrences(position: int, counts: tuple[int, ...]) -> list[int]:
    """Returns how often each item occurs before a position of the same sequence.

    Example:
      >>> occurrences(4, (3, 0, 5, 1))
      [2, 0, 2, 0]

    Args:
      position: an integer from 0, which may be beyond N: the sequence is repeated.
      counts: as for `spread_evenly`, with any sum.
    """
    result = [0] * len(counts)
    pending = [(_huffman(counts), position)]
    while pending:
        (total, group), number = pending.pop()
        if isinstance(group, int):
            result[group] = number
            continue
        first, second = group
        before = (2 * number * first[0] + total) // (2 * total)
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
    spread evenly by `spread_evenly`. So any position is found without the ones before
    it.

    With one batch in each update, this is `spread_evenly`.

    Example: the short batches (0) are in updates with long ones (2).
      >>> updates = SpreadUpdates(np.array([2, 4, 2]), size=2)
      >>> items, numbers = updates.at(np.arange(8))
      >>> items.reshape(-1, 2).tolist()
      [[1, 1], [0, 2], [1, 1], [0, 2]]
      >>> numbers.reshape(-1, 2).tolist()
      [[0, 3], [0, 1], [1, 2], [1, 0]]

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
        self._ends = np.cumsum(counts)
        self.num_updates = int(counts.sum()) // size
        self._counts, self._firsts = self._kinds()

    def _kinds(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the number of updates of each combination, and the first of them."""
        places = self._ends - self.num_updates * np.arange(self._size)[:, None]
        places[1::2] = self.num_updates - places[1::2]
        inner = places[(places > 0) & (places < self.num_updates)]
        borders = np.unique([0, *inner.tolist(), self.num_updates])
        return np.diff(borders), borders[:-1]

    def at(
        self, positions: np.ndarray, start: int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the buckets at given positions.

        Args:
          positions: `[n]` integers, below the sum of `counts`.
          start: the update that comes first.

        Returns:
          `[n]` int64, the bucket at each position, and `[n]` int64, the number of its
          batch: different numbers from 0 to `counts[k] - 1` for bucket k.

        Raises:
          ValueError: if there are 2**31 updates or more.
        """
        whole = self.num_updates * self._size
        places = positions - self._head
        is_whole = (places >= 0) & (places < whole)
        items, numbers = np.empty((2, len(positions)), np.int64)
        updates, parts = np.divmod(places[is_whole], self._size)
        updates = (updates + start) % max(1, self.num_updates)
        items[is_whole], numbers[is_whole] = self._batches(updates, parts)
        other = positions[~is_whole]
        other = np.where(other < self._head, other, other - whole)
        items[~is_whole] = self._others[other]
        numbers[~is_whole] = self._other_numbers[other]
        return items, numbers

    def _batches(
        self, updates: np.ndarray, parts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the buckets and numbers of the batches of whole updates."""
        kinds, numbers = spread_evenly(updates, self._counts)
        steps = self._firsts[kinds] + numbers
        steps = np.where(parts % 2, self.num_updates - 1 - steps, steps)
        batches = self.num_updates * parts + steps
        buckets = np.searchsorted(self._ends, batches, side="right")
        return buckets, batches - np.append(0, self._ends)[buckets]


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
