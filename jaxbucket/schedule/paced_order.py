"""The batches of a curriculum, drawn from the open examples of each bucket."""

from __future__ import annotations

import bisect
import itertools
import math
from typing import Any

import numpy as np

from jaxbucket.base.permutation import fold, permute
from jaxbucket.schedule.epoch_rows import EpochRows
from jaxbucket.schedule.metric import OpenExamples
from jaxbucket.schedule.recent import recent

# The unit in which numbers of batches become integer weights of buckets.
_WEIGHT_UNIT = 2**32


class PacedOrder:
    """Draws without replacement, which requires dealing each epoch from its start.

    The two most recent epochs are cached, at 4 bytes per example each. Whenever a share
    falls, the remaining examples are sorted again.

    Args:
      opened: the open examples of every epoch.
      rows, seed, first: as for `Order.epoch_order`. The first epoch starts with the
        bucket of `first`.
    """

    def __init__(
        self, opened: OpenExamples, rows: EpochRows, seed: int, first: int | None
    ):
        self._opened = opened
        self._rows = rows
        self._seed = seed
        self._first = None if first is None else int(rows.bucket_of(first))
        self._epochs: dict[int, tuple[np.ndarray, ...]] = {}

    def batch(self, epoch: int, position: int) -> tuple[int, np.ndarray]:
        buckets, ends, dealt = recent(self._epochs, epoch, lambda: self._deal(epoch))
        examples = dealt[ends[position] : ends[position + 1]]
        return int(buckets[position]), examples.astype(np.int64)

    def _deal(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the S batches of an epoch.

        Returns:
          `[S]` integers, the bucket of each batch; `[S + 1]` integers, the places where
          its examples start and end; and the examples of all batches.
        """
        sizes = self._rows.sizes.tolist()
        left = [self._examples(epoch, bucket) for bucket in range(len(sizes))]
        buckets, batches = [], []
        while len(batches) < self._rows.num_batches:
            rise = self._opened.rise(epoch, len(batches))
            pools = [
                _Pool(*rise.by_opening(examples), size)
                for examples, size in zip(left, sizes, strict=True)
            ]
            for number in range(rise.num_batches):
                for pool in pools:
                    pool.open(pool.open_at[number])
                key = fold(self._seed, epoch, len(pools), len(batches))
                bucket = _choose(pools, key)
                if epoch == len(batches) == 0 and self._first is not None:
                    bucket = self._first
                buckets.append(bucket)
                batches.append(pools[bucket].draw(key))
            left = [pool.left() for pool in pools]
        ends = np.cumsum([0, *map(len, batches)])
        return np.array(buckets), ends, np.concatenate(batches)

    def _examples(self, epoch: int, bucket: int) -> np.ndarray:
        """Returns the rows that a bucket has in a shuffled epoch."""
        row = np.arange(self._rows.flow.rows[bucket])
        return self._rows.examples(bucket, row, self._seed, epoch)


class _Pool:
    """The remaining examples of a bucket, which are open or still closed.

    Args:
      examples: `[n]` integers, in the order in which they open.
      keys: `[n]` integers, rising, to compare the examples of different buckets.
      num_open: `[S]` integers, the number of examples, including those already drawn,
        that are open at each batch.
      size: the number of rows of a full batch.
    """

    def __init__(
        self, examples: np.ndarray, keys: np.ndarray, num_open: np.ndarray, size: int
    ):
        self._examples = examples
        self._keys = keys
        self.open_at: list[int] = num_open.tolist()
        self._size = size
        # Positions in `examples`. The positions before `_next` are open or were drawn.
        self._next = 0
        self._open = np.empty(len(examples), examples.dtype)
        self._num_open = 0

    @property
    def _left(self) -> int:
        return self._num_open + len(self._examples) - self._next

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
        """The key that must be open for the next batch; inf if none is left."""
        if not self._left:
            return math.inf
        return int(self._keys[self._next + max(self._need - self._num_open, 1) - 1])

    def left(self) -> np.ndarray:
        """Returns the examples that were not drawn, in the order of their opening."""
        is_open = np.sort(self._open[: self._num_open])
        return np.concatenate([self._examples[is_open], self._examples[self._next :]])

    def open(self, last: int) -> None:
        """Opens the examples before a position."""
        if (count := last - self._next) > 0:
            moved = np.arange(self._next, last)
            self._open[self._num_open : self._num_open + count] = moved
            self._num_open += count
            self._next = last

    def draw(self, key: int) -> np.ndarray:
        """Returns the examples of the next batch, and opens more if necessary."""
        need = self._need
        self.open(self._next + need - self._num_open)
        slots = permute(np.arange(need), self._num_open, key)
        drawn = self._open[slots]
        # Open examples from the end replace those that were drawn.
        end = self._num_open - need
        stays = np.ones(need, bool)
        stays[slots[slots >= end] - end] = False
        self._open[slots[slots < end]] = self._open[end : self._num_open][stays]
        self._num_open = end
        return self._examples[drawn]


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
    """Returns a random index, with probabilities in proportion to weights."""
    ends = list(itertools.accumulate(weights))
    # The 64-bit hash is scaled to [0, total).
    return bisect.bisect_right(ends, (fold(key) * ends[-1]) >> 64)


class OpenDraws:
    """Draws with replacement: every step draws from all open examples.

    The examples are sorted once for each epoch, and whenever a share falls. The two
    most recent results are cached, at 4 bytes per example each.

    Args:
      opened: the open examples of every epoch.
      rows, seed: as for `Order.epoch_order`.
    """

    def __init__(self, opened: OpenExamples, rows: EpochRows, seed: int):
        self._opened = opened
        self._rows = rows
        self._seed = seed
        self._sorted: dict[tuple[int, int], Any] = {}

    def batch(self, epoch: int, position: int) -> tuple[int, np.ndarray]:
        counts, examples = self.open_examples(epoch, position)
        sizes = self._rows.sizes.tolist()
        # In proportion to the batches of the open examples.
        pairs = zip(counts, sizes, strict=True)
        weights = [count * _WEIGHT_UNIT // size for count, size in pairs]
        key = fold(self._seed, epoch, len(sizes), position)
        bucket = _draw_index(weights, key)
        size, num_open = sizes[bucket], counts[bucket]
        drawn = permute(np.arange(min(size, num_open)), num_open, key)
        # If fewer examples than rows are open, they are repeated evenly.
        return bucket, examples[bucket][np.resize(drawn, size)].astype(np.int64)

    def open_examples(
        self, epoch: int, position: int
    ) -> tuple[list[int], list[np.ndarray]]:
        """Returns the number of open examples in each bucket, and its examples.

        The open examples of a bucket come first. At least one is open.
        """
        start = self._opened.start(epoch, position)

        def sort() -> tuple[list[np.ndarray], list[np.ndarray]]:
            rise, own = self._opened.rise(epoch, start), self._rows.bucket_examples
            buckets = [rise.by_opening(own(x)) for x in range(len(self._rows.plan))]
            return [x for x, _, _ in buckets], [counts for _, _, counts in buckets]

        examples, counts = recent(self._sorted, (epoch, start), sort)
        return [int(num_open[position - start]) for num_open in counts], examples
