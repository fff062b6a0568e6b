"""Runs of batches in which one number orders the examples by when they open.

With one metric, this number is the rank by difficulty. With several, an example is open
when every metric opens it. The *level* of a batch has a threshold for each metric. If
all levels of a run of batches can be sorted so that none of their thresholds falls,
each example has a first level that opens it, and the examples of lower levels are open
whenever those of higher levels are. A run ends where this would no longer hold. If no
threshold ever falls, or all rise and fall together, an epoch is a single run.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxbucket.schedule.epoch_rows import EpochRows
from jaxbucket.schedule.metric import Metric, Pace

# How far ahead examples are ordered by when they open, and at how many batches in each
# doubling of the distance.
_EPOCHS_AHEAD = 256
_BATCHES_AHEAD = 8


class Run(NamedTuple):
    """Consecutive batches of an epoch.

    Attributes:
      difficulty: `[N]` numbers: examples open in this order.
      limits: `[n]` numbers, the greatest open difficulty at each batch.
      heights: `[n]` integers, which are greater if more is open, and 0 if nothing is.
    """

    difficulty: np.ndarray
    limits: np.ndarray
    heights: np.ndarray

    def num_open(self, difficulty: np.ndarray) -> np.ndarray:
        """Returns how many of `[m]` sorted difficulties each batch opens, `[n]`."""
        counts = np.searchsorted(difficulty, self.limits, side="right")
        return np.where(self.heights > 0, counts, 0)


class PacedRuns:
    """The runs of every epoch.

    Examples are ordered by the first level that opens them. Behind the levels of a run
    come those of later batches, so that the others are in the order in which they will
    open: exactly within the epoch, and up to an eighth of the distance after it.
    Examples that open at the same level are ordered by their greatest rank.

    Args:
      metrics: the metrics.
      rows: the rows of an epoch.

    Attributes:
      ranks: M arrays `[N]` of unsigned integers, the ranks of each example.
    """

    def __init__(self, metrics: Sequence[Metric], rows: EpochRows):
        is_kept = rows.is_kept()
        self._rows = rows
        self.ranks, self._paces = [], []
        for metric in metrics:
            ranks, values = metric.ranks(is_kept)
            self.ranks.append(ranks)
            self._paces.append(Pace(metric.pacing, values, rows))

    def of_epoch(self, epoch: int) -> Iterator[Run]:
        levels = self.levels(epoch)
        ranks = [self._rows.largest(x, epoch) for x in self.ranks]
        if len(ranks) == 1:
            # Its levels always form a chain, whatever comes later.
            yield self.run(levels, levels[:0], ranks)
            return
        later = np.concatenate([levels, self._levels_ahead(epoch)])
        for first, last in chains(levels):
            yield self.run(levels[first:last], later[last:], ranks)

    def levels(self, epoch: int) -> np.ndarray:
        """Returns the level of each batch, `[num_batches, M]` int64."""
        return np.stack([pace.counts(epoch) for pace in self._paces], axis=1)

    def run(
        self, levels: np.ndarray, later: np.ndarray, ranks: Sequence[np.ndarray]
    ) -> Run:
        """Returns the run of some batches.

        Args:
          levels: `[n, M]` integers, the levels of the batches, which form a chain.
          later: `[m, M]` integers, the levels of later batches.
          ranks: M arrays `[N]`, the ranks of each example or packed row.
        """
        if len(ranks) == 1:
            return Run(ranks[0], levels[:, 0], levels[:, 0])
        chain, index = np.unique(levels, axis=0, return_inverse=True)
        rising = np.maximum.accumulate(np.concatenate([chain[-1:], later]))
        is_new = np.any(rising[1:] != rising[:-1], axis=1)
        chain = np.concatenate([chain, rising[1:][is_new]])
        heights = index.reshape(-1) + 1
        # The index of a level and a rank become one integer.
        unit = len(self.ranks[0]) + 1
        difficulty = _first_level(chain, ranks, unit)
        difficulty *= unit
        difficulty += np.maximum.reduce(ranks)
        return Run(difficulty, heights * unit - 1, heights)

    def _levels_ahead(self, epoch: int) -> np.ndarray:
        """Returns the levels of some batches after an epoch, `[m, M]` int64."""
        size = self._rows.num_batches
        levels = []
        bits = (_EPOCHS_AHEAD * size).bit_length()
        for distance in _distances(bits):
            later, position = divmod(size + distance, size)
            levels.append([x.count(epoch + later, position) for x in self._paces])
        return np.array(levels)


def _first_level(
    chain: np.ndarray, ranks: Sequence[np.ndarray], num_ranks: int
) -> np.ndarray:
    """Returns the index of the first level that opens each example, `[N]` int64.

    Args:
      chain: `[L, M]` integers, sorted levels.
      ranks: M arrays `[N]` of integers below `num_ranks`.
      num_ranks: the number of possible ranks.
    """
    first = np.zeros(len(ranks[0]), np.int64)
    for metric_ranks, thresholds in zip(ranks, chain.T, strict=True):
        opens = np.searchsorted(thresholds, np.arange(num_ranks)).astype(np.uint32)
        np.maximum(first, opens[metric_ranks], out=first)
    return first


def _distances(bits: int) -> list[int]:
    """Returns increasing integers below `2**bits`, some in each doubling."""
    scaled = [
        (i << bit) // _BATCHES_AHEAD
        for bit in range(bits)
        for i in range(_BATCHES_AHEAD, 2 * _BATCHES_AHEAD)
    ]
    return [0, *sorted(set(scaled))]


def chains(levels: np.ndarray) -> Iterator[tuple[int, int]]:
    """Splits batches into runs whose levels form a chain, each as long as possible.

    Example:
      >>> list(chains(np.array([[1, 1], [2, 1], [1, 1], [1, 2], [3, 3]])))
      [(0, 3), (3, 5)]

    Args:
      levels: `[n, M]` integers.

    Returns:
      Pairs of the first batch of a run and the first after it.
    """
    first = 0
    while first < len(levels):
        size = 1
        while first + size < len(levels):
            if not _is_chain(levels[first : first + 2 * size]):
                break
            size *= 2
        longest = min(2 * size, len(levels) - first)
        size = bisect.bisect_left(
            range(longest + 1),
            True,
            lo=min(size, longest),
            key=lambda n, first=first: not _is_chain(levels[first : first + n]),
        )
        yield first, first + size - 1
        first += size - 1


def _is_chain(levels: np.ndarray) -> bool:
    """Returns whether levels can be sorted so that no threshold falls."""
    levels = levels[np.lexsort(levels.T[::-1])]
    return bool(np.all(levels[1:] >= levels[:-1]))
