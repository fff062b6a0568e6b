"""Batches of a curriculum without replacement, drawn from a pool for each bucket."""

from __future__ import annotations

import bisect
import itertools
import math
from typing import NamedTuple

import numpy as np

from jaxbucket.base.permutation import fold, permute
from jaxbucket.schedule.epoch_rows import EpochRows, shuffled_slots
from jaxbucket.schedule.paced_runs import PacedRuns, Run
from jaxbucket.schedule.recent import recent


class PacedOrder:
    """Draws without replacement, which requires dealing each epoch from its start.

    The two most recent epochs are cached, at 4 bytes per example each. With several
    metrics, the remaining examples are sorted again at the start of each run.

    Args:
      runs: the runs of every epoch, which decide which examples are open.
      rows: the rows of an epoch.
      seed: the seed of all random choices.
      first: a batch of the bucket with which the first epoch starts; None for any.
    """

    def __init__(
        self,
        runs: PacedRuns,
        rows: EpochRows,
        seed: int,
        first: int | None,
    ):
        self._runs = runs
        self._rows = rows
        self._seed = seed
        self._first = None if first is None else int(rows.bucket_of(first))
        self._epochs: dict[int, _DealtEpoch] = {}

    def batch(self, epoch: int, position: int) -> tuple[int, np.ndarray]:
        dealt = self._dealt(epoch)
        examples = dealt.examples[dealt.ends[position] : dealt.ends[position + 1]]
        return int(dealt.buckets[position]), examples.astype(np.int64)

    def buckets(self, epoch: int) -> np.ndarray:
        return self._dealt(epoch).buckets

    def _dealt(self, epoch: int) -> _DealtEpoch:
        return recent(self._epochs, epoch, lambda: self._deal(epoch))

    def _deal(self, epoch: int) -> _DealtEpoch:
        left = [self._examples(epoch, k) for k in range(len(self._rows.plan))]
        buckets, batches = [], []
        for run in self._runs.of_epoch(epoch):
            sizes = self._rows.sizes.tolist()
            pools = [_pool(run, *pair) for pair in zip(left, sizes, strict=True)]
            has_fallen = np.diff(run.heights, prepend=0) < 0
            for number, fallen in enumerate(has_fallen.tolist()):
                for pool in pools:
                    pool.open(number, has_fallen=fallen)
                position = len(buckets)
                key = fold(self._seed, epoch, len(pools), position)
                if epoch == position == 0 and self._first is not None:
                    bucket = self._first
                else:
                    bucket = _choose(pools, key)
                buckets.append(bucket)
                batches.append(pools[bucket].draw(key))
            left = [pool.left() for pool in pools]
        ends = np.cumsum([0, *map(len, batches)])
        return _DealtEpoch(np.array(buckets), ends, np.concatenate(batches))

    def _examples(self, epoch: int, bucket: int) -> np.ndarray:
        """Returns the rows that a bucket has in a shuffled epoch."""
        row = np.arange(self._rows.flow.rows[bucket])
        return self._rows.examples(bucket, row, shuffled_slots(self._seed, epoch))


def _pool(run: Run, examples: np.ndarray, size: int) -> _Pool:
    """Returns the pool of a bucket at the start of a run.

    Args:
      run: the run.
      examples: `[n]` integers, the examples that the bucket has left.
      size: the number of rows of a full batch.
    """
    difficulty = run.difficulty[examples]
    order = np.argsort(difficulty, kind="stable")
    examples = examples[order].astype(_narrow(len(run.difficulty)))
    difficulty = difficulty[order]
    return _Pool(examples, difficulty, run.num_open(difficulty).tolist(), size)


class _DealtEpoch(NamedTuple):
    """All batches of one epoch.

    Attributes:
      buckets: `[S]` integers, the bucket of each batch.
      ends: `[S + 1]` integers: batch s has `examples[ends[s] : ends[s + 1]]`.
      examples: the examples of all batches, concatenated.
    """

    buckets: np.ndarray
    ends: np.ndarray
    examples: np.ndarray


class _Pool:
    """The remaining examples of a bucket in a run, which are open or still closed.

    Args:
      examples: `[n]` integers, the easiest first.
      difficulty: `[n]` numbers, the difficulty of each example.
      open_at: `[S]` integers, the number of examples, including those already drawn,
        that the pace opens at each batch of the run.
      size: the number of rows of a full batch.
    """

    def __init__(
        self,
        examples: np.ndarray,
        difficulty: np.ndarray,
        open_at: list[int],
        size: int,
    ):
        self._examples = examples
        self._difficulty = difficulty
        self._open_at = open_at
        self._size = size
        # Positions in `examples`. The positions before `_next` are open or were drawn.
        self._closed = np.arange(len(examples), dtype=_narrow(len(examples)))
        self._next = 0
        self._open = np.empty_like(self._closed)
        self._num_open = 0

    @property
    def _left(self) -> int:
        return self._num_open + len(self._closed) - self._next

    @property
    def _need(self) -> int:
        """The number of rows of the next batch; the last batch may be smaller."""
        return min(self._size, self._left)

    @property
    def batches_open(self) -> int:
        """The number of batches that the open examples can fill."""
        if self._num_open == self._left:
            return -(-self._left // self._size)
        return self._num_open // self._size

    @property
    def hardest_needed(self) -> float:
        """The difficulty that must be open for the next batch; inf if none is left."""
        if not self._left:
            return math.inf
        last = self._next + max(self._need - self._num_open, 1) - 1
        # Python numbers compare exactly, even integers that have no exact float.
        return self._difficulty[self._closed[last]].item()

    def open(self, position: int, *, has_fallen: bool) -> None:
        """Opens the examples that the pace allows, after closing all if it fell."""
        if has_fallen:
            self._closed = self._places_left()
            self._next = self._num_open = 0
        # With a different dtype numpy would convert the whole array.
        limit = self._closed.dtype.type(self._open_at[position])
        self._move(int(np.searchsorted(self._closed[self._next :], limit)))

    def left(self) -> np.ndarray:
        """Returns the examples that were not drawn, the easiest first."""
        return self._examples[self._places_left()]

    def _places_left(self) -> np.ndarray:
        left = (self._open[: self._num_open], self._closed[self._next :])
        return np.sort(np.concatenate(left))

    def _move(self, count: int) -> None:
        moved = self._closed[self._next : self._next + count]
        self._open[self._num_open : self._num_open + count] = moved
        self._num_open += count
        self._next += count

    def draw(self, key: int) -> np.ndarray:
        """Returns the examples of the next batch, and opens more if necessary."""
        need = self._need
        self._move(max(0, need - self._num_open))
        slots = permute(np.arange(need), self._num_open, key)
        drawn = self._open[slots]
        # Open examples from the end replace those that were drawn.
        end = self._num_open - need
        stays = np.ones(need, bool)
        stays[slots[slots >= end] - end] = False
        self._open[slots[slots < end]] = self._open[end : self._num_open][stays]
        self._num_open = end
        return self._examples[drawn]


def _narrow(size: int) -> type[np.integer]:
    """Returns the smallest dtype that holds indices below `size`."""
    return np.uint32 if size < 2**32 else np.int64


def _choose(pools: list[_Pool], key: int) -> int:
    """Returns a random bucket, weighted by the batches that its open examples can fill.

    If no bucket can fill a batch, returns the one whose next batch is the easiest.
    """
    weights = [pool.batches_open for pool in pools]
    if any(weights):
        return draw_index(weights, key)
    needed = [pool.hardest_needed for pool in pools]
    return needed.index(min(needed))


def draw_index(weights: list[int], key: int) -> int:
    """Returns a random index, with probabilities in proportion to weights."""
    ends = list(itertools.accumulate(weights))
    # The 64-bit hash is scaled to [0, total).
    return bisect.bisect_right(ends, (fold(key) * ends[-1]) >> 64)
