"""A sequence in which every item keeps to its share of the positions."""

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
