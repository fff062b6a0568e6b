"""An order by length with noise, which is drawn anew in every epoch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxbucket.base.checks import check_share
from jaxbucket.base.permutation import fold, mix_each
from jaxbucket.schedule.epoch_rows import EpochRows, shuffled_slots
from jaxbucket.schedule.opening import OpeningSteps
from jaxbucket.schedule.orders import EpochOrder, Order
from jaxbucket.schedule.recent import recent

# Separates the keys of the noise from those of rows and batches.
_NOISE_KEY = 0x2015E


class NoisySorted(Order):
    """Sorts examples by their length with noise, which every epoch draws anew.

    An example of length n has the key n * (1 + u), where u is uniform between -noise
    and noise and differs by example and epoch. Each bucket takes its examples by this
    key, and batches are sorted by their largest key. So the examples of a batch have
    similar lengths, and batches come from short to long, with exceptions as large as
    the noise. The names "ascending" and "descending" are the same without noise, and
    have the same batches in every epoch.

    The order of an epoch is computed when its first step is needed. The two most recent
    epochs are cached, at 4 bytes per example each.

    Example:
      >>> from jaxbucket import BatchSchedule, Bucket, BucketPlan
      >>> plan = BucketPlan((Bucket(4, 8), Bucket(2, 16)), max_tokens=32)
      >>> lengths = np.arange(1, 17)
      >>> schedule = BatchSchedule(plan, lengths, order=NoisySorted(noise=0.2))
      >>> for batch in schedule:
      ...     print(lengths[batch.rows].tolist())
      [1, 2, 3, 4]
      [6, 5, 7, 8]
      [9, 10]
      [12, 11]
      [14, 13]
      [15, 16]

    Args:
      noise: the greatest deviation as a share of the length, from 0 to 1. With 0, only
        examples of the same length are shuffled.
      descending: whether the longest come first.

    Raises:
      ValueError: if `noise` is not from 0 to 1, or `descending` is not a bool.
    """

    def __init__(self, noise: float = 0.1, *, descending: bool = False):
        self.noise = check_share("noise", noise)
        if not isinstance(descending, bool):
            raise ValueError(
                f"`descending={descending!r}` is not a bool. Pass True or False."
            )
        self.descending = descending

    def __repr__(self) -> str:
        return f"NoisySorted(noise={self.noise}, descending={self.descending})"

    def __str__(self) -> str:
        direction = "descending" if self.descending else "ascending"
        return f"{direction} with noise {self.noise}"

    def epoch_order(self, rows, lengths, seed, opening) -> EpochOrder:
        return _NoisyEpochs(rows, lengths, seed, opening, self.noise, self.descending)


class _SortedEpoch(NamedTuple):
    """All batches of one epoch.

    Attributes:
      batches: `[num_batches]` int64, the numbers of the batches, in their order.
      examples: for each bucket, the examples in its rows.
    """

    batches: np.ndarray
    examples: list[np.ndarray]


class _NoisyEpochs:
    """Sorts the shuffled rows of each bucket, and its batches among all others.

    Args:
      rows: the rows of an epoch.
      lengths: `[N]` lengths.
      seed: the seed of all random choices.
      opening: the first batches of the first epoch; None without an opening.
      noise: the greatest deviation as a share of the length.
      descending: whether the longest come first.
    """

    def __init__(
        self,
        rows: EpochRows,
        lengths: np.ndarray,
        seed: int,
        opening: OpeningSteps | None,
        noise: float,
        descending: bool,
    ):
        self._rows = rows
        self._lengths = lengths
        self._seed = seed
        self._opening = opening
        self._noise = noise
        self._sign = -1 if descending else 1
        self._epochs: dict[int, _SortedEpoch] = {}

    def batch(self, epoch: int, position: int) -> tuple[int, np.ndarray]:
        batches, examples = self._epoch(epoch)
        bucket, row = self._rows.batch_rows(int(batches[position]))
        return bucket, examples[bucket][row].astype(np.int64)

    def buckets(self, epoch: int) -> np.ndarray:
        return self._rows.bucket_of(self._epoch(epoch).batches)

    def _epoch(self, epoch: int) -> _SortedEpoch:
        return recent(self._epochs, epoch, lambda: self._sort(epoch))

    def _sort(self, epoch: int) -> _SortedEpoch:
        pairs = [self._sort_rows(epoch, k) for k in range(len(self._rows.plan))]
        largest = np.concatenate([largest for _, largest in pairs])
        batches = np.argsort(self._sign * largest, kind="stable")
        if epoch == 0 and self._opening is not None:
            batches = self._opening.prepend_to(batches)
        return _SortedEpoch(batches, [examples for examples, _ in pairs])

    def _sort_rows(self, epoch: int, bucket: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the examples in the rows of a bucket, and each batch's largest key.

        The rows are shuffled first, so that every epoch promotes or drops others.
        """
        row = np.arange(self._rows.flow.rows[bucket])
        slots = shuffled_slots(self._seed, epoch)
        examples = self._rows.examples(bucket, row, slots)
        keys = self._keys(epoch, examples)
        order = np.argsort(self._sign * keys, kind="stable")
        starts = np.arange(0, len(row), int(self._rows.sizes[bucket]))
        narrow = np.uint32 if len(self._lengths) <= 2**32 else np.int64
        return (
            examples[order].astype(narrow),
            np.maximum.reduceat(keys[order], starts),
        )

    def _keys(self, epoch: int, examples: np.ndarray) -> np.ndarray:
        """Returns the `[n]` float64 lengths of examples, with noise."""
        hashes = mix_each(examples, fold(self._seed, epoch, _NOISE_KEY))
        # A float64 holds 53 bits exactly, so the keys are the same on every machine.
        uniform = (hashes >> np.uint64(11)) * 2.0**-53
        return self._lengths[examples] * (1 + self._noise * (2 * uniform - 1))
