"""Orders by a pace: every example once, dealt from pools, or draws with replacement."""

from __future__ import annotations

import bisect
import itertools
import math
from typing import Any, NamedTuple

import numpy as np

from jaxbucket.base.permutation import fold, permute
from jaxbucket.schedule.epoch_rows import EpochRows, shuffled_slots
from jaxbucket.schedule.opening import OpeningSteps
from jaxbucket.schedule.orders import LOCK
from jaxbucket.schedule.pacing import Pacing, open_share

# A share is rounded to so many parts: powers differ between machines in the last bit.
_PARTS = 10**9
_EPOCHS_KEPT = 2
# Weights of buckets as integers.
_ONE = 2**32


class Pace:
    """The greatest difficulty that is open, by batch.

    Args:
      pacing: epochs done -> share that is open.
      difficulty: `[N]`, of the examples that the plan keeps, sorted.
      num_batches: of an epoch.
    """

    def __init__(self, pacing: Pacing, difficulty: np.ndarray, num_batches: int):
        self._pacing = pacing
        self._sorted = difficulty
        self._num_batches = num_batches

    def at(self, epoch: int, position: int) -> Any:
        """Returns what a batch may have at most, as a number of the array's dtype."""
        share = open_share(self._pacing, epoch + position / self._num_batches)
        count = -(-round(share * _PARTS) * len(self._sorted) // _PARTS)
        return self._sorted[max(count, 1) - 1]

    def of_epoch(self, epoch: int) -> np.ndarray:
        """Returns it for all batches of an epoch, `[num_batches]`."""
        return np.array([self.at(epoch, p) for p in range(self._num_batches)])


class PacedOrder:
    """Draws without replacement, so that an epoch has to be dealt from its beginning.

    The last two epochs asked for are kept, because loaders that read ahead are in the
    next one already: 4 bytes per example each.

    Args:
      difficulty: `[N]` numbers.
      pace: which of them are open at a batch.
      rows: the rows of an epoch.
      seed: another one has other batches.
      opening: how the first epoch begins, if that is planned.
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
                for old in list(self._epochs)[:-_EPOCHS_KEPT]:
                    del self._epochs[old]
            return self._epochs[epoch]

    def _deal(self, epoch: int) -> _DealtEpoch:
        pace = self._pace.of_epoch(epoch)
        pools = [self._pool(epoch, k, pace) for k in range(len(self._rows.plan))]
        opening = self._opening if epoch == 0 else []
        buckets, batches = [], []
        for position in range(self._rows.num_batches):
            falls = position > 0 and pace[position] < pace[position - 1]
            for pool in pools:
                pool.open(position, again=bool(falls))
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
    """`[S]` buckets, `[S + 1]` ends of the batches, and their examples end to end."""

    buckets: np.ndarray
    ends: np.ndarray
    examples: np.ndarray


class _Pool:
    """What is left of a bucket in an epoch: open, or still closed.

    Args:
      examples: `[n]`, the easiest first.
      difficulty: `[n]` theirs.
      open_at: `[S]`, how many of all are open at each batch of the epoch.
      size: rows of a full batch.
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
        # Places in `examples`; those before `_next` are open, or were drawn.
        self._closed = np.arange(len(examples), dtype=_narrow(len(examples)))
        self._next = 0
        self._open = np.empty_like(self._closed)
        self._num_open = 0

    @property
    def _left(self) -> int:
        return self._num_open + len(self._closed) - self._next

    @property
    def _need(self) -> int:
        """Rows of the next batch; the last one may have fewer."""
        return min(self._size, self._left)

    @property
    def batches_open(self) -> int:
        """How many batches can be filled with what is open."""
        if self._num_open == self._left:
            return -(-self._left // self._size)
        return self._num_open // self._size

    @property
    def hardest_needed(self) -> float:
        """The difficulty that the next batch needs; inf if there is no next one."""
        if not self._left:
            return math.inf
        last = self._next + max(self._need - self._num_open, 1) - 1
        # As Python's number: exact, also among integers that no float equals.
        return self._difficulty[self._closed[last]].item()

    def open(self, position: int, *, again: bool) -> None:
        """Opens what the pace allows; `again`, if it has fallen."""
        if again:
            left = (self._open[: self._num_open], self._closed[self._next :])
            self._closed = np.sort(np.concatenate(left))
            self._next = self._num_open = 0
        # Of the same dtype: for another one numpy would convert the whole array.
        limit = self._closed.dtype.type(self._open_at[position])
        self._move(int(np.searchsorted(self._closed[self._next :], limit)))

    def _move(self, count: int) -> None:
        moved = self._closed[self._next : self._next + count]
        self._open[self._num_open : self._num_open + count] = moved
        self._num_open += count
        self._next += count

    def draw(self, key: int) -> np.ndarray:
        """Returns the examples of the next batch, opening more if it needs them."""
        need = self._need
        self._move(max(0, need - self._num_open))
        slots = permute(np.arange(need), self._num_open, key)
        drawn = self._open[slots]
        # The last ones take the places of those that were drawn.
        end = self._num_open - need
        stays = np.ones(need, bool)
        stays[slots[slots >= end] - end] = False
        self._open[slots[slots < end]] = self._open[end : self._num_open][stays]
        self._num_open = end
        return self._examples[drawn]


def _narrow(size: int) -> type[np.integer]:
    """The dtype that takes the least memory for indices below `size`."""
    return np.uint32 if size < 2**32 else np.int64


def _choose(pools: list[_Pool], key: int) -> int:
    """A bucket at random by the batches it can fill, or the one that comes nearest."""
    weights = [pool.batches_open for pool in pools]
    if any(weights):
        return _draw_index(weights, key)
    needed = [pool.hardest_needed for pool in pools]
    return needed.index(min(needed))


def _draw_index(weights: list[int], key: int) -> int:
    ends = list(itertools.accumulate(weights))
    # 64 bits scaled to [0, total).
    return bisect.bisect_right(ends, (fold(key) * ends[-1]) >> 64)


class EasyDraws:
    """Draws with replacement: any step from all that is open.

    Args:
      difficulty: `[N]` numbers.
      pace: which of them are open at a batch.
      rows: the rows of an epoch, of which the numbers alone count; sorted by difficulty
        within each bucket.
      seed: another one has other batches.
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
        # Fewer than a batch come more than once, so that each is drawn as often.
        drawn = np.resize(drawn, size)
        return bucket, self._rows.bucket_examples(bucket)[drawn].astype(np.int64)

    def buckets(self, epoch: int) -> np.ndarray:
        positions = range(self._rows.num_batches)
        return np.array([self._bucket(epoch, position)[0] for position in positions])

    def _bucket(self, epoch: int, position: int) -> tuple[int, int, int]:
        """The bucket, how many of its examples are open, and a key."""
        pace = self._pace.at(epoch, position)
        counts = [int(np.searchsorted(x, pace, side="right")) for x in self._sorted]
        sizes = self._rows.sizes.tolist()
        weights = [n * _ONE // size for n, size in zip(counts, sizes, strict=True)]
        key = fold(self._seed, epoch, len(sizes), position)
        bucket = _draw_index(weights, key)
        return bucket, counts[bucket], key
