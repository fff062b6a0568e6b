"""A sequence in which every item keeps to its share of the positions."""

from __future__ import annotations

import heapq

import numpy as np


def spread_evenly(counts: np.ndarray) -> np.ndarray:
    """Returns a sequence that repeats every item at an even pace.

    In the first t of N positions, item k occurs t * counts[k] / N times, with an error
    of less than one. In any other window of the sequence, or of its repetitions, the
    error is less than two. Sequences with the smallest possible error are the solution
    of the chairman assignment problem, which is to schedule every occurrence between a
    release and a deadline (Tijdeman, "The chairman assignment problem", 1980).

    Example:
      >>> spread_evenly(np.array([3, 0, 5, 1]))
      array([2, 0, 2, 0, 2, 2, 3, 0, 2])

    Args:
      counts: `[K]` integers, the number of occurrences of each item; N is their sum.

    Returns:
      `[N]` int64, the item at each position.
    """
    sequence = np.empty(int(counts.sum()), np.int64)
    left = counts.tolist()
    windows = _Windows(left)
    # The next occurrence of every item, before and after its release.
    early = [(*windows.of(k, 0), k) for k in np.flatnonzero(counts).tolist()]
    heapq.heapify(early)
    released: list[tuple[int, int]] = []
    for position in range(len(sequence)):
        while early and early[0][0] <= position:
            _, deadline, item = heapq.heappop(early)
            heapq.heappush(released, (deadline, item))
        _, item = heapq.heappop(released)
        sequence[position] = item
        left[item] -= 1
        if left[item]:
            window = windows.of(item, windows.counts[item] - left[item])
            heapq.heappush(early, (*window, item))
    return sequence


class _Windows:
    """The positions between the release and the deadline of each occurrence.

    They are exact integers, because a rounding error could leave a position empty.
    """

    def __init__(self, counts: list[int]):
        self.counts = list(counts)
        self._total = sum(counts)
        self._slack = max(1, 2 * (sum(map(bool, counts)) - 1))

    def of(self, item: int, number: int) -> tuple[int, int]:
        """Returns the first and the last position of an occurrence of an item."""
        pace = self._slack * self.counts[item]
        start, end = self._slack * number + 1, self._slack * (number + 1) - 1
        return -(-self._total * start // pace) - 1, self._total * end // pace
