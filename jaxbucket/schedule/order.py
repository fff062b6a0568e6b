"""What a schedule needs of an order: `Order` is chosen, `EpochOrder` is what it makes.

A new order is one class: a subclass of `Order` that any `BatchSchedule` takes as its
`order=`. A name for it is a line of `orders.NAMED`.
"""

from __future__ import annotations

import abc
import threading
from typing import Protocol

import numpy as np

from jaxbucket.schedule.epoch_rows import EpochRows
from jaxbucket.schedule.grouping import Within
from jaxbucket.schedule.opening import OpeningSteps

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
