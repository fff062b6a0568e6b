"""A sequence of updates that each have batches of all lengths, as far as possible."""

from __future__ import annotations

import functools

import numpy as np

from jaxbucket.schedule.spread import spread_evenly


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
