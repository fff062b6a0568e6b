"""Draws with replacement: every step draws from all open examples."""

from __future__ import annotations

import bisect
from typing import NamedTuple

import numpy as np

from jaxbucket.base.permutation import fold, permute
from jaxbucket.schedule.epoch_rows import EpochRows
from jaxbucket.schedule.paced_order import draw_index
from jaxbucket.schedule.paced_runs import PacedRuns, chains
from jaxbucket.schedule.recent import recent

# The unit in which numbers of batches become integer weights of buckets.
_WEIGHT_UNIT = 2**32


class _SortedRun(NamedTuple):
    """The examples of each bucket in the order in which they open in a run.

    Attributes:
      examples: K arrays of integers.
      counts: `[L, K]` integers, the number of open examples at each level.
    """

    examples: list[np.ndarray]
    counts: np.ndarray


class EasyDraws:
    """Draws with replacement.

    The buckets are sorted once for each run of batches, in a time that grows with the
    number of all examples. Two runs are cached, at 4 bytes per example each. Once the
    thresholds stay the same, there is only one.

    Args:
      runs: the runs of every epoch, which decide which examples are open.
      rows: the rows of an epoch, which define the number of batches in an epoch.
      seed: the seed of all random choices.
    """

    def __init__(self, runs: PacedRuns, rows: EpochRows, seed: int):
        self._runs = runs
        self._rows = rows
        self._seed = seed
        self._epochs: dict[int, tuple[list[tuple[int, int]], np.ndarray]] = {}
        self._found: dict[tuple[int, int], tuple[_SortedRun, np.ndarray]] = {}
        self._sorted: dict[bytes, _SortedRun] = {}

    def batch(self, epoch: int, position: int) -> tuple[int, np.ndarray]:
        counts, examples = self.open_examples(epoch, position)
        bucket, key = self._bucket(epoch, position, counts)
        size, num_open = int(self._rows.sizes[bucket]), counts[bucket]
        drawn = permute(np.arange(min(size, num_open)), num_open, key)
        # If fewer examples than rows are open, they are repeated evenly.
        drawn = np.resize(drawn, size)
        return bucket, examples[bucket][drawn].astype(np.int64)

    def buckets(self, epoch: int) -> np.ndarray:
        positions = range(self._rows.num_batches)
        counts = (self.open_examples(epoch, x)[0] for x in positions)
        pairs = zip(positions, counts, strict=True)
        return np.array([self._bucket(epoch, x, count)[0] for x, count in pairs])

    def _bucket(self, epoch: int, position: int, counts: list[int]) -> tuple[int, int]:
        """Returns a bucket, drawn by the batches of its open examples, and a key."""
        sizes = self._rows.sizes.tolist()
        pairs = zip(counts, sizes, strict=True)
        weights = [count * _WEIGHT_UNIT // size for count, size in pairs]
        key = fold(self._seed, epoch, len(sizes), position)
        return draw_index(weights, key), key

    def open_examples(
        self, epoch: int, position: int
    ) -> tuple[list[int], list[np.ndarray]]:
        """Returns the number of open examples in each bucket, and its examples.

        The open examples of a bucket come first. At least one is open.
        """
        ranges, levels = recent(self._epochs, epoch, lambda: self._ranges(epoch))
        number = bisect.bisect_right(ranges, position, key=lambda x: x[0]) - 1
        first, last = ranges[number]

        def find() -> tuple[_SortedRun, np.ndarray]:
            chain, index = np.unique(levels[first:last], axis=0, return_inverse=True)
            key = chain.tobytes()
            return recent(self._sorted, key, lambda: self._sort(chain)), index

        run, index = recent(self._found, (epoch, number), find)
        return run.counts[index.reshape(-1)[position - first]].tolist(), run.examples

    def _ranges(self, epoch: int) -> tuple[list[tuple[int, int]], np.ndarray]:
        """Returns the first and last batches of all runs, and the levels of batches."""
        levels = self._runs.levels(epoch)
        return list(chains(levels)), levels

    def _sort(self, chain: np.ndarray) -> _SortedRun:
        run = self._runs.run(chain, chain[:0], self._runs.ranks)
        examples, keys, counts = [], [], []
        for bucket in range(len(self._rows.plan)):
            in_bucket = self._rows.bucket_examples(bucket)
            difficulty = run.difficulty[in_bucket]
            order = np.argsort(difficulty, kind="stable")
            examples.append(in_bucket[order])
            keys.append(difficulty[order])
            counts.append(run.num_open(keys[-1]))
        counts = np.stack(counts, axis=1)
        # If nothing is open, the examples that open first are.
        easiest = min(x[0] for x in keys if len(x))
        first = [np.searchsorted(x, easiest, side="right") for x in keys]
        counts[counts.sum(axis=1) == 0] = first
        return _SortedRun(examples, counts)
