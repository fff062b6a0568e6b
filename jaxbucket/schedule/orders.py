"""The interface of orders, which arrange the batches of an epoch, and the named orders.

To add an order, subclass `Order` and pass an instance to a `BatchSchedule` as `order=`.
To give it a name, add it to `NAMED`.
"""

from __future__ import annotations

import abc
import functools
from typing import Any, Literal, Protocol, TypeAlias, cast

import numpy as np

from jaxbucket.base.checks import check_choice, check_positive, check_type
from jaxbucket.base.permutation import fold, mix_each, permute, permute_each
from jaxbucket.schedule.epoch_rows import EpochBatches, EpochRows, Within
from jaxbucket.schedule.spread import spread_updates

OrderName: TypeAlias = Literal[
    "shuffled", "spread", "source", "ascending", "descending"
]
# A bucket has at least this number of windows, so that its batches differ between
# epochs, as in `group_by_length` of Hugging Face's Trainer.
_MIN_WINDOWS = 4


class EpochOrder(Protocol):
    """The batches of `EpochRows` in the order of every epoch."""

    def batch(self, epoch: int, position: int) -> tuple[int, np.ndarray]:
        """Returns a batch of an epoch.

        Args:
          epoch: the epoch, counted from 0.
          position: the position of the batch in the epoch.

        Returns:
          The index of the bucket in the plan, and the `[n]` int64 examples of the rows
          that are not empty.
        """
        ...


class Order(abc.ABC):
    """Decides which examples share a batch, and in which order the batches come.

    The `str` of an order is part of the fingerprint of the schedule. Two orders with
    different batches must have different strings.

    Attributes:
      is_redrawn: whether every epoch has different batches.
      replacement: whether an epoch may have an example several times.
      within: how the examples of a bucket are sorted before they fill rows: in "source"
        order, or "ascending" or "descending" by length.
    """

    is_redrawn: bool = True
    replacement: bool = False
    within: Within = "source"

    @abc.abstractmethod
    def __str__(self) -> str: ...

    @abc.abstractmethod
    def epoch_order(
        self,
        rows: EpochRows,
        lengths: np.ndarray,
        seed: int,
        first: int | None,
    ) -> EpochOrder:
        """Returns the order of the batches of one schedule.

        Args:
          rows: the rows of an epoch, sorted by `within`.
          lengths: `[N]` integers, the lengths of the examples or packed rows.
          seed: the seed of all random choices.
          first: the number of the batch that comes first in the first epoch; None for
            the usual order.
        """

    def check(self, num_examples: int) -> None:  # noqa: B027
        """Raises a ValueError if the order is not for this number of examples, N."""

    def slot_difficulty(self, is_kept: np.ndarray | None) -> np.ndarray | None:
        """Returns `[N]` difficulties if easy examples share packed rows, else None.

        This requires `is_redrawn`.

        Args:
          is_kept: `[N]` bool, whether each example takes part; None if all do.
        """
        return None


class Drawn(Order):
    """Draws new batches in every epoch, without a pass over the data and a state.

    Attributes:
      name: the name of the order.
      epochs: the class that numbers the batches.
    """

    def __init__(self, name: str, epochs: type[ShuffledEpochs]):
        self.name, self.epochs = name, epochs

    def __str__(self) -> str:
        return self.name

    def epoch_order(self, rows, lengths, seed, first) -> EpochOrder:
        return self.epochs(rows, seed, first)


class GroupedByLength(Drawn):
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
        super().__init__(f"grouped by length in windows of {self.window}", SpreadEpochs)

    def __repr__(self) -> str:
        return f"GroupedByLength(window={self.window})"

    def epoch_order(self, rows, lengths, seed, first) -> EpochOrder:
        return _GroupedEpochs(rows, seed, first, lengths, self.window)


class Fixed(Order):
    """Repeats the same batches in every epoch, filling rows with sorted examples.

    In source order a batch comes as soon as it is full. Otherwise batches are sorted by
    the length of their longest example.

    Attributes:
      within: how the examples of a bucket are sorted.
    """

    is_redrawn = False

    def __init__(self, within: Within):
        self.within = within

    def __str__(self) -> str:
        return str(self.within)

    def epoch_order(self, rows, lengths, seed, first) -> EpochOrder:
        return _FixedEpochs(rows, seed, first, self.within, lengths)


class ShuffledEpochs:
    """Numbers the batches of an epoch by bucket, and permutes the numbers.

    Args:
      rows, seed, first: as for `Order.epoch_order`. If the rows have no examples, only
        `number` can be called.
    """

    def __init__(self, rows: EpochBatches, seed: int, first: int | None):
        self._rows = rows
        self._seed = seed
        self._first = first

    def batch(self, epoch: int, position: int) -> tuple[int, np.ndarray]:
        bucket, row = self._rows.batch_rows(self.number(epoch, position))
        return bucket, self._examples(epoch, bucket, np.arange(row.start, row.stop))

    def _examples(self, epoch: int, bucket: int, row: np.ndarray) -> np.ndarray:
        """Returns the examples in the `[n]` rows of a bucket."""
        rows = cast(EpochRows, self._rows)
        return rows.examples(bucket, row, self._seed, epoch)

    def number(self, epoch: int, position: int) -> int:
        """Returns the number of the batch at a position of an epoch.

        It does not depend on the examples of the batches.
        """
        # K, so that this key differs from those of the buckets.
        key = fold(self._seed, epoch, len(self._rows.plan))
        first, counts = self._first, self._rows.flow.batches
        if epoch or first is None:
            return self._number_at(position, counts, key, 0)
        if position == 0:
            return first
        counts = counts - (np.arange(len(counts)) == self._rows.bucket_of(first))
        head = self._rows.batches_per_step - 1
        drawn = self._number_at(position - 1, counts, key, head)
        return drawn + (drawn >= first)

    def _number_at(self, position: int, counts: np.ndarray, key: int, head: int) -> int:
        """Returns the batch at a position, if bucket k has `counts[k]`.

        With `largest_first`, the first `head` of them share the step of that batch.
        """
        return int(permute(np.array([position]), int(counts.sum()), key)[0])


class SpreadEpochs(ShuffledEpochs):
    """Spreads the batches of each bucket evenly over the steps.

    With one batch in each step, any t consecutive batches of a run include the share of
    every bucket, t * n / N for a bucket with n of the N batches of an epoch, with an
    error of less than four, and typically less than two. (For most shares of three or
    more buckets, no order has errors of less than one in every window.)

    With several micro-batches of different buckets in a step, short ones are in the
    same step as long ones, so that the steps of an epoch have similar mixes of lengths.
    The steps are spread evenly by their mix.

    All epochs have the same sequence of buckets, and each draws the examples of its
    batches. If every bucket has a single full batch, epochs are therefore equal; use
    "shuffled" instead.
    """

    def _number_at(self, position: int, counts: np.ndarray, key: int, head: int) -> int:
        size = self._rows.batches_per_step
        updates = spread_updates(tuple(counts.tolist()), size, head)
        # The seed decides where the sequence starts, and not the epoch, because it
        # would otherwise not continue evenly from one epoch to the next.
        start = fold(self._seed, len(counts)) % max(1, updates.num_updates)
        bucket, number = updates.at(position, start)
        # The last batch of a bucket, which may not be full, is not always its last one.
        one = slice(bucket, bucket + 1)
        keys = mix_each(np.array([bucket]), key)
        (number,) = permute_each(np.array([number]), counts[one], keys).tolist()
        return int(counts[:bucket].sum()) + number


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


class _FixedEpochs(ShuffledEpochs):
    """Sorts batches by their longest example or by their last example in the source.

    Batches in source order fill up in the order of their last examples.
    """

    def __init__(
        self,
        rows: EpochRows,
        seed: int,
        first: int | None,
        within: Within,
        lengths: np.ndarray,
    ):
        super().__init__(rows, seed, first)
        self._within, self._lengths = within, lengths

    def _examples(self, epoch: int, bucket: int, row: np.ndarray) -> np.ndarray:
        return cast(EpochRows, self._rows).examples(bucket, row)

    def number(self, epoch: int, position: int) -> int:
        if epoch or self._first is None:
            return int(self._sorted[position])
        others = self._sorted[self._sorted != self._first]
        return int(others[position - 1]) if position else self._first

    @functools.cached_property
    def _sorted(self) -> np.ndarray:
        """`[num_batches]` batches, sorted by their largest example or length."""
        largest = [self._largest(k) for k in range(len(self._rows.plan))]
        sign = -1 if self._within == "descending" else 1
        return np.argsort(sign * np.concatenate(largest), kind="stable")

    def _largest(self, bucket: int) -> np.ndarray:
        """Returns the largest example, or length, of each batch of a bucket.

        It is the maximum over all rows, because rows that were carried up from shorter
        buckets come last in a batch but may come early in the source.
        """
        row = np.arange(self._rows.flow.rows[bucket])
        values = self._examples(0, bucket, row)
        if self._within != "source":
            values = self._lengths[values].astype(np.int64)
        starts = np.arange(0, len(row), self._rows.sizes[bucket])
        return np.maximum.reduceat(values, starts) if len(row) else values


NAMED: dict[str, Order] = {
    "shuffled": Drawn("shuffled", ShuffledEpochs),
    "spread": Drawn("spread", SpreadEpochs),
    "source": Fixed("source"),
    "ascending": Fixed("ascending"),
    "descending": Fixed("descending"),
}


def check_order(order: Any, num_examples: int) -> Order:
    """Returns an order, which may be given by its name."""
    if isinstance(order, str):
        check_choice("order", order, list(NAMED))
        order = NAMED[order]
    check_type("order", order, Order, f"Or pass one of the names {', '.join(NAMED)}.")
    order.check(num_examples)
    return order
