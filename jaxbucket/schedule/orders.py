"""Orders of the batches of an epoch: what they are, and those that have names.

A new order is one class: a subclass of `Order` that any `BatchSchedule` takes as its
`order=`. A name for it is a line of `NAMED`.
"""

from __future__ import annotations

import abc
import functools
import threading
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from jaxbucket.base.checks import check_choice
from jaxbucket.base.permutation import fold, permute
from jaxbucket.schedule.epoch_rows import EpochRows, shuffled_slots
from jaxbucket.schedule.grouping import Within
from jaxbucket.schedule.opening import OpeningSteps

OrderName: TypeAlias = Literal["shuffled", "source", "ascending", "descending"]

# Rows looked at together.
_CHUNK = 1 << 20
# Of all orders, because a lock of their own could not be sent to worker processes.
# Reentrant, because a pacing function may look into another order.
LOCK = threading.RLock()


class EpochOrder(Protocol):
    """The batches of every epoch, in order; they are those of `EpochRows`."""

    def batch(self, epoch: int, position: int) -> tuple[int, np.ndarray]:
        """Returns a batch of an epoch.

        Args:
          epoch: from 0 on.
          position: of the batch in the epoch.

        Returns:
          The bucket, as an index into the plan's, and the `[n]` int64 examples of the
          rows that are filled.
        """
        ...

    def buckets(self, epoch: int) -> np.ndarray:
        """Returns the `[num_batches]` buckets of an epoch, in order."""
        ...


class Order(abc.ABC):
    """Which examples share a batch, and how the batches of an epoch follow each other.

    Its `str` is a part of the schedule's fingerprint: it must differ from that of any
    order with other batches.

    Attributes:
      is_redrawn: whether another epoch has other batches.
      replacement: whether an epoch may have an example several times.
      within: how the examples of a bucket are sorted before they fill rows: as in the
        "source", "ascending" or "descending" by length, or by `[N]` numbers.
    """

    is_redrawn: bool = True
    replacement: bool = False
    within: Within | np.ndarray = "source"

    @abc.abstractmethod
    def __str__(self) -> str: ...

    @abc.abstractmethod
    def epoch_order(
        self,
        rows: EpochRows,
        lengths: np.ndarray,
        seed: int,
        opening: OpeningSteps | None,
    ) -> EpochOrder:
        """Returns the order of the batches of one schedule.

        Args:
          rows: the rows of an epoch, sorted by `within`.
          lengths: `[N]` integers, of examples or of packed rows.
          seed: of all that is drawn.
          opening: how the first epoch begins, if that is planned.

        Raises:
          ValueError: for an opening that it cannot keep to.
        """

    def check(self, num_examples: int, *, is_packed: bool) -> None:  # noqa: B027
        """Raises a ValueError if it is not one of these examples.

        Args:
          num_examples: how many there are.
          is_packed: whether rows have several examples.
        """


class Shuffled(Order):
    """Every epoch draws new batches, and a new order of them, by integer permutations.

    There is no pass over the data, and no state.
    """

    def __str__(self) -> str:
        return "shuffled"

    def epoch_order(self, rows, lengths, seed, opening) -> EpochOrder:
        return _ShuffledEpochs(rows, seed, opening)


class Fixed(Order):
    """Every epoch is the same, and rows are filled as the examples are sorted.

    Batches in source order come as they fill up, others by the length of their longest
    example.

    Args:
      within: how the examples of a bucket are sorted.
    """

    is_redrawn = False

    def __init__(self, within: Within):
        self.within = within

    def __str__(self) -> str:
        return str(self.within)

    def epoch_order(self, rows, lengths, seed, opening) -> EpochOrder:
        by_length = None if self.within == "source" else lengths
        return _FixedEpochs(rows, by_length, self.within == "descending", opening)


NAMED: dict[str, Order] = {
    "shuffled": Shuffled(),
    "source": Fixed("source"),
    "ascending": Fixed("ascending"),
    "descending": Fixed("descending"),
}


def check_order(order: Any, num_examples: int, *, is_packed: bool) -> Order:
    """Returns an order of these examples, given itself or by its name.

    Raises:
      ValueError: if there is none of that name, or it is not one of these examples.
    """
    if isinstance(order, str):
        check_choice("order", order, list(NAMED))
        order = NAMED[order]
    elif not isinstance(order, Order):
        raise ValueError(
            f"`order` is a {type(order).__name__}: choose one of {', '.join(NAMED)}, "
            "or give a `Curriculum` of difficulties."
        )
    order.check(num_examples, is_packed=is_packed)
    return order


class _ShuffledEpochs:
    def __init__(self, rows: EpochRows, seed: int, opening: OpeningSteps | None):
        self._rows = rows
        self._seed = seed
        self._opening = opening

    def batch(self, epoch: int, position: int) -> tuple[int, np.ndarray]:
        (number,) = self._numbers(epoch, np.array([position]))
        bucket, row = self._rows.of_batch(int(number))
        slots = shuffled_slots(self._seed, epoch)
        return bucket, self._rows.examples(bucket, row, slots)

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
        is_planned = positions < opening.num_batches
        numbers[is_planned] = opening.batches[positions[is_planned]]
        later = positions[~is_planned] - opening.num_batches
        drawn = permute(later, size - opening.num_batches, key)
        numbers[~is_planned] = opening.nth_left(drawn)
        return numbers


class _FixedEpochs:
    """By the length of the longest example of each batch, or by the last one's place.

    Args:
      rows: the rows of an epoch.
      lengths: `[N]`; None for batches in the order in which they fill up.
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

        Of all rows, because those carried up may come early in the source.
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
