"""An order that spreads the buckets, and draws examples of similar lengths together."""

from __future__ import annotations

import numpy as np

from jaxbucket.base.checks import check_positive
from jaxbucket.schedule.epoch_rows import EpochRows
from jaxbucket.schedule.orders import EpochOrder, Order, SpreadEpochs

# A bucket has at least this number of windows, so that its batches differ between
# epochs, as in `group_by_length` of Hugging Face's Trainer.
_MIN_WINDOWS = 4


class GroupedByLength(Order):
    """Spreads the buckets as "spread" does, with similar lengths in every batch.

    In every epoch, the examples of each bucket are shuffled and divided into windows of
    a few batches. Each window is sorted by length and then cut into batches, so the
    lengths in a batch differ less than those of its bucket. Use this if the time of a
    step depends on the lengths themselves and not only on the shape, as with attention
    that skips the blocks of other examples and of padding.

    The buckets of the steps are those of "spread", and the batches of a window are at
    random steps of their bucket. Any step is computed from one window, without a state.

    Example:
      >>> from jaxbucket import BatchSchedule, plan_buckets
      >>> lengths = np.random.default_rng(0).integers(1, 100, 1000)
      >>> plan = plan_buckets(lengths, max_tokens=1600, boundaries=[50, 99])
      >>> for order in ("spread", GroupedByLength(window=4)):
      ...     batches = BatchSchedule(plan, lengths, order=order)
      ...     ranges = [np.ptp(lengths[x.rows[x.rows >= 0]]) for x in batches]
      ...     print(f"{np.mean(ranges):.1f}")
      44.6
      13.2

    Args:
      window: the number of batches in a window, at most a quarter of the batches that
        the bucket has in an epoch. With more, lengths are more similar, and batches of
        different epochs too.

    Raises:
      ValueError: if `window` is not a positive integer.
    """

    def __init__(self, window: int = 50):
        self.window = check_positive("window", window)

    def __repr__(self) -> str:
        return f"GroupedByLength(window={self.window})"

    def __str__(self) -> str:
        return f"grouped by length in windows of {self.window}"

    def epoch_order(self, rows, lengths, seed, first) -> EpochOrder:
        return _GroupedEpochs(rows, seed, first, lengths, self.window)


class _GroupedEpochs(SpreadEpochs):
    """Sorts the shuffled rows of a bucket by length, within each window."""

    def __init__(
        self,
        rows: EpochRows,
        seed: int,
        first: int | None,
        lengths: np.ndarray,
        window: int,
    ):
        super().__init__(rows, seed, first)
        self._lengths = lengths
        batches = np.clip(rows.flow.batches // _MIN_WINDOWS, 1, window)
        # The number of rows in a window of each bucket.
        self._window_rows: list[int] = (batches * rows.sizes).tolist()

    def _examples(self, epoch: int, bucket: int, row: np.ndarray) -> np.ndarray:
        num_rows = self._window_rows[bucket]
        first = int(row[0]) // num_rows * num_rows
        last = min(first + num_rows, int(self._rows.flow.rows[bucket]))
        window = super()._examples(epoch, bucket, np.arange(first, last))
        by_length = np.argsort(self._lengths[window], kind="stable")
        return window[by_length[row - first]]
