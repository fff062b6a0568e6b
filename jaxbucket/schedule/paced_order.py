"""The orders of a curriculum: from pools without replacement, or with replacement."""

from __future__ import annotations

import bisect
import itertools
import math
from typing import NamedTuple

import numpy as np

from jaxbucket.base.permutation import fold, permute
from jaxbucket.schedule.epoch_rows import EpochRows, shuffled_slots
from jaxbucket.schedule.opening import OpeningSteps
from jaxbucket.schedule.orders import LOCK
from jaxbucket.schedule.pace import Pace

_NUM_CACHED_EPOCHS = 2
# The unit in which numbers of batches become integer weights of buckets.
_WEIGHT_UNIT = 2**32


class PacedOrder:
    """Draws without replacement, which requires dealing each epoch from its start.

    The two most recent epochs are cached, at 4 bytes per example each, because loaders
    that read ahead may already be in the next epoch.

    Args:
      difficulty: `[N]` numbers.
      pace: the greatest open difficulty at each batch.
      rows: the rows of an epoch.
      seed: the seed of all random choices.
      opening: the first batches of the first epoch; None if they are not planned.
    """

    def __init__(
        self,
        difficulty: np.ndarray,
        pace: Pace,
        rows: EpochRows,
        seed: int,
        opening: OpeningSteps | None,
    ):
        self._difficulty = difficulty
        self._pace = pace
        self._rows = rows
        self._seed = seed
        planned = opening.batches if opening is not None else np.empty(0, np.int64)
        self._opening = rows.bucket_of(planned).tolist()
        self._epochs: dict[int, _DealtEpoch] = {}

    def batch(self, epoch: int, position: int) -> tuple[int, np.ndarray]:
        dealt = self._dealt(epoch)
        examples = dealt.examples[dealt.ends[position] : dealt.ends[position + 1]]
        return int(dealt.buckets[position]), examples.astype(np.int64)

    def buckets(self, epoch: int) -> np.ndarray:
        return self._dealt(epoch).buckets

    def _dealt(self, epoch: int) -> _DealtEpoch:
        with LOCK:
            if epoch not in self._epochs:
                self._epochs[epoch] = self._deal(epoch)
                for old in list(self._epochs)[:-_NUM_CACHED_EPOCHS]:
                    del self._epochs[old]
            return self._epochs[epoch]

    def _deal(self, epoch: int) -> _DealtEpoch:
        pace = self._pace.of_epoch(epoch)
        pools = [self._pool(epoch, k, pace) for k in range(len(self._rows.plan))]
        opening = self._opening if epoch == 0 else []
        buckets, batches = [], []
        for position in range(self._rows.num_batches):
            has_fallen = position > 0 and pace[position] < pace[position - 1]
            for pool in pools:
                pool.open(position, has_fallen=bool(has_fallen))
            key = fold(self._seed, epoch, len(pools), position)
            if position < len(opening):
                bucket = opening[position]
            else:
                bucket = _choose(pools, key)
            buckets.append(bucket)
            batches.append(pools[bucket].draw(key))
        ends = np.cumsum([0, *map(len, batches)])
        return _DealtEpoch(np.array(buckets), ends, np.concatenate(batches))

    def _pool(self, epoch: int, bucket: int, pace: np.ndarray) -> _Pool:
        """The rows that this bucket has in a shuffled epoch, by difficulty."""
        row = np.arange(self._rows.flow.rows[bucket])
        slots = shuffled_slots(self._seed, epoch)
        examples = self._rows.examples(bucket, row, slots)
        difficulty = self._difficulty[examples]
        order = np.argsort(difficulty, kind="stable")
        examples, difficulty = examples[order], difficulty[order]
        return _Pool(
            examples.astype(_narrow(len(self._difficulty))),
            difficulty,
            np.searchsorted(difficulty, pace, side="right").tolist(),
            int(self._rows.sizes[bucket]),
        )


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
    """The remaining examples of a bucket in an epoch, which are open or still closed.

    Args:
      examples: `[n]` integers, the easiest first.
      difficulty: `[n]` numbers, the difficulty of each example.
      open_at: `[S]` integers, the number of examples, including those already drawn,
        that the pace opens at each batch of the epoch.
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
            left = (self._open[: self._num_open], self._closed[self._next :])
            self._closed = np.sort(np.concatenate(left))
            self._next = self._num_open = 0
        # With a different dtype numpy would convert the whole array.
        limit = self._closed.dtype.type(self._open_at[position])
        self._move(int(np.searchsorted(self._closed[self._next :], limit)))

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
        return _draw_index(weights, key)
    needed = [pool.hardest_needed for pool in pools]
    return needed.index(min(needed))


def _draw_index(weights: list[int], key: int) -> int:
    ends = list(itertools.accumulate(weights))
    # The 64-bit hash is scaled to [0, total).
    return bisect.bisect_right(ends, (fold(key) * ends[-1]) >> 64)


class EasyDraws:
    """Draws with replacement: every step draws from all open examples.

    Args:
      difficulty: `[N]` numbers.
      pace: the greatest open difficulty at each batch.
      rows: the rows of an epoch, sorted by difficulty within each bucket. They define
        the examples of a bucket and the number of batches in an epoch.
      seed: the seed of all random choices.
    """

    def __init__(self, difficulty: np.ndarray, pace: Pace, rows: EpochRows, seed: int):
        self._pace = pace
        self._rows = rows
        self._seed = seed
        self._sorted = [
            difficulty[rows.bucket_examples(bucket)] for bucket in range(len(rows.plan))
        ]

    def batch(self, epoch: int, position: int) -> tuple[int, np.ndarray]:
        bucket, num_open, key = self._bucket(epoch, position)
        size = int(self._rows.sizes[bucket])
        drawn = permute(np.arange(min(size, num_open)), num_open, key)
        # If fewer examples than rows are open, they are repeated evenly.
        drawn = np.resize(drawn, size)
        return bucket, self._rows.bucket_examples(bucket)[drawn].astype(np.int64)

    def buckets(self, epoch: int) -> np.ndarray:
        positions = range(self._rows.num_batches)
        return np.array([self._bucket(epoch, position)[0] for position in positions])

    def _bucket(self, epoch: int, position: int) -> tuple[int, int, int]:
        """Returns the bucket, the number of its open examples, and a key."""
        pace = self._pace.at(epoch, position)
        counts = [int(np.searchsorted(x, pace, side="right")) for x in self._sorted]
        sizes = self._rows.sizes.tolist()
        pairs = zip(counts, sizes, strict=True)
        weights = [count * _WEIGHT_UNIT // size for count, size in pairs]
        key = fold(self._seed, epoch, len(sizes), position)
        bucket = _draw_index(weights, key)
        return bucket, counts[bucket], key
