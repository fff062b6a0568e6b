"""Orders of an epoch that need no pass over it: shuffled, as in the source, by length.

An order says which batch is at a position of an epoch, and what is in its rows.
"""

from __future__ import annotations

import functools
import threading
from typing import Protocol

import numpy as np

from jaxbucket.base.permutation import fold, permute
from jaxbucket.schedule.epoch_rows import EpochRows
from jaxbucket.schedule.opening import OpeningSteps

# Rows looked at together.
_CHUNK = 1 << 20
# Of all orders, for a lock of their own could not be sent to worker processes. One
# that may ask for another order while it is made: a pacing function may be anything.
LOCK = threading.RLock()


class EpochOrder(Protocol):
    """What a schedule needs of an order; batches are those of `EpochRows`."""

    def batch(self, epoch: int, position: int) -> tuple[int, np.ndarray]:
        """Returns the bucket, and the `[n]` examples of the rows that are filled."""
        ...

    def buckets(self, epoch: int) -> np.ndarray:
        """Returns the `[num_batches]` buckets of an epoch, in order."""
        ...


class ShuffledOrder:
    """Every epoch draws new batches, and a new order of them, by integer permutations.

    Args:
      rows: the rows of an epoch.
      seed: another one has other batches.
      opening: how the first epoch begins, if that is planned.
    """

    def __init__(self, rows: EpochRows, seed: int, opening: OpeningSteps | None):
        self._rows = rows
        self._seed = seed
        self._opening = opening

    def batch(self, epoch: int, position: int) -> tuple[int, np.ndarray]:
        (number,) = self._numbers(epoch, np.array([position]))
        bucket, row = self._rows.of_batch(int(number))
        return bucket, self._rows.examples(bucket, row, shuffled(self._seed, epoch))

    def buckets(self, epoch: int) -> np.ndarray:
        positions = np.arange(self._rows.num_batches)
        return self._rows.bucket_of(self._numbers(epoch, positions))

    def _numbers(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """The batches at `[n]` positions of an epoch."""
        size = self._rows.num_batches
        key = fold(self._seed, epoch, len(self._rows.plan))
        opening = self._opening
        if epoch or opening is None:
            return permute(positions, size, key)
        numbers = np.empty(len(positions), np.int64)
        planned = positions < opening.num_batches
        numbers[planned] = opening.batches[positions[planned]]
        later = positions[~planned] - opening.num_batches
        left = permute(later, size - opening.num_batches, key)
        numbers[~planned] = opening.nth_left(left)
        return numbers


class FixedOrder:
    """Every epoch is the same, and rows are filled as the examples are sorted.

    Args:
      rows: the rows of an epoch.
      lengths: `[N]`, for batches that come by the length of their longest example, the
        shortest first; none for batches in the order in which they fill up.
      descending: the longest first.
      opening: how the first epoch begins, if that is planned.
    """

    def __init__(
        self,
        rows: EpochRows,
        lengths: np.ndarray | None,
        descending: bool,
        opening: OpeningSteps | None,
    ):
        self._rows = rows
        self._lengths = lengths
        self._descending = descending
        self._opening = opening

    def batch(self, epoch: int, position: int) -> tuple[int, np.ndarray]:
        bucket, row = self._rows.of_batch(int(self._order(epoch)[position]))
        return bucket, self._rows.examples(bucket, row)

    def buckets(self, epoch: int) -> np.ndarray:
        return self._rows.bucket_of(self._order(epoch))

    def _order(self, epoch: int) -> np.ndarray:
        with LOCK:
            return self._sorted if epoch or self._opening is None else self._opened

    @functools.cached_property
    def _sorted(self) -> np.ndarray:
        """`[num_batches]`: batches by their last example, or by their longest one."""
        largest = [self._largest(k) for k in range(len(self._rows.plan))]
        key = np.concatenate(largest)
        return np.argsort(-key if self._descending else key, kind="stable")

    @functools.cached_property
    def _opened(self) -> np.ndarray:
        assert self._opening is not None
        return self._opening.before(self._sorted)

    def _largest(self, bucket: int) -> np.ndarray:
        """The largest example, or length, of each batch of a bucket.

        Of all rows: those that come up may come early in the source.
        """
        size = int(self._rows.sizes[bucket])
        num_rows = int(self._rows.flow.rows[bucket])
        largest = [np.empty(0, np.int64)]
        chunk = size * max(1, _CHUNK // size)
        for first in range(0, num_rows, chunk):
            row = np.arange(first, min(first + chunk, num_rows))
            values = self._rows.examples(bucket, row)
            if self._lengths is not None:
                values = self._lengths[values].astype(np.int64)
            starts = np.arange(0, len(row), size)
            largest.append(np.maximum.reduceat(values, starts))
        return np.concatenate(largest)


def shuffled(seed: int, epoch: int):
    """Returns the `Slots` of an epoch that is drawn anew."""
    return lambda bucket, row, size: permute(row, size, fold(seed, epoch, bucket))
