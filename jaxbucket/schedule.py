"""Which examples fill which bucket at which step: a pure function of the step.

Nothing here advances. `schedule[step]` is computed from the plan, the lengths and the
seed alone, so every host computes the same, and resuming takes one integer.
"""

from __future__ import annotations

import copy
import functools
import json
import operator
from collections.abc import Iterator
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base import EMPTY_ROW, BatchIndices, BucketPlan, digest
from jaxbucket.checks import check_choice, check_lengths, check_seed
from jaxbucket.opening import Opening, OpeningSteps
from jaxbucket.permutation import fold, permute
from jaxbucket.position import DataPosition
from jaxbucket.remainder import Remainder, flow_remainders

Order: TypeAlias = Literal["shuffled", "source", "ascending", "descending"]

_BY_LENGTH = ("ascending", "descending")


class BatchSchedule:
    """Step -> `BatchIndices`, without end: after one epoch follows the next.

    Within an epoch every example that the plan keeps is in exactly one row. Examples
    that do not fill their bucket's last batch go up into a longer bucket, or stay as
    one batch with empty rows, whichever costs fewer padded tokens; `remainder` may say
    otherwise.

    Orders:

    * "shuffled": every epoch draws new batches, and a new order of them, by keyed
      integer permutations: no pass over the data, no state.
    * "source": every epoch is the same. Each bucket takes its examples in source
      order, and batches come in the order in which they fill up.
    * "ascending", "descending": every epoch is the same. Each bucket takes its examples
      by length, and batches come by the length of their longest example.

    Example:
      >>> from jaxbucket import Bucket
      >>> plan = BucketPlan((Bucket(5, 4), Bucket(2, 10)), max_tokens=20)
      >>> schedule = BatchSchedule(plan, [3, 9, 4, 8, 2, 10], order="source")
      >>> for batch in schedule:
      ...     print(batch.bucket, batch.rows)
      [2, 10] [1 3]
      [5, 4] [ 0  2  4 -1 -1]
      [2, 10] [ 5 -1]

    It keeps 4 bytes per example beside `lengths`, which it refers to and does not
    copy: do not change the array afterwards.

    Attributes:
      plan: the shapes.
      lengths: `[N]` integers.
      seed: any integer from 0 to 2**63 - 1.
      order: one of the orders above.
      remainder: what becomes of the examples that fill no batch: "cheapest", "promote"
        to go up always, "pad" to stay always, or "drop" to leave them out, other ones
        in every epoch if it is shuffled.
      opening: how the first epoch begins: pairs of a bucket and a number of steps, or
        "largest_first" for one step of the bucket with the most tokens. The rest of
        that epoch follows in order.
      first_step: the step that its first epoch begins with; 0, but for a schedule made
        by `continue_with`.
      continues: fingerprint of the schedule that has the steps before; None if none.
      flow: how many rows and batches every bucket has in one epoch.

    Raises:
      ValueError: for lengths the plan refuses or drops altogether, an unknown order or
        remainder, an opening that the epoch has not, or a seed out of range.
    """

    def __init__(
        self,
        plan: BucketPlan,
        lengths: ArrayLike,
        *,
        seed: int = 0,
        order: Order = "shuffled",
        remainder: Remainder = "cheapest",
        opening: Opening | None = None,
    ):
        check_choice("order", order, get_args(Order))
        self.plan = plan
        self.lengths = check_lengths(lengths)
        self.seed = check_seed(seed)
        self.order: Order = order
        self.remainder: Remainder = remainder
        self.opening = opening
        self.first_step = 0
        self.continues: str | None = None
        self._examples, counts = _group(plan.assign(self.lengths), len(plan))
        self._offsets = np.cumsum(counts) - counts
        if order in _BY_LENGTH:
            _sort_by_length(self._examples, self._offsets, self.lengths, order)
        self.flow = flow_remainders(
            counts, plan.batch_sizes, plan.boundaries, remainder
        )
        self._first_batch = np.cumsum(self.flow.batches) - self.flow.batches
        if not counts.any():
            raise ValueError(
                "`overlong='drop'` leaves out every example: all are longer than "
                f"`seq_len={plan.max_seq_len}`. Plan with a larger `max_seq_len`."
            )
        if not self.flow.num_batches:
            raise ValueError(
                "`remainder='drop'` leaves out every example: none of the buckets "
                f"{', '.join(map(str, plan.buckets))} is filled once. Keep remainders, "
                "or plan with a smaller `max_tokens`."
            )
        self._opening = (
            OpeningSteps(plan, self.flow.batches, opening) if opening else None
        )

    def continue_with(self, position: DataPosition) -> BatchSchedule:
        """Returns this schedule, taking over from another one at a position.

        The explicit way to go on with grown data, another plan or another seed: an
        epoch of this schedule begins with the position's step, and those before it
        stay the other's.

        Example:
          >>> from jaxbucket import batch_dataset, plan_buckets
          >>> source = [{"x": [1] * n} for n in (1, 2, 3, 4)]
          >>> plan = plan_buckets([4], max_tokens=8, boundaries=[4])
          >>> before = BatchSchedule(plan, [1, 2], seed=0)
          >>> position = batch_dataset(source[:2], before).position(7)
          >>> grown = BatchSchedule(plan, [1, 2, 3, 4], seed=0).continue_with(position)
          >>> grown.first_step, len(grown)
          (7, 2)

        Raises:
          ValueError: if `position` is no `DataPosition`.
        """
        if not isinstance(position, DataPosition):
            raise ValueError(
                f"`position` is a {type(position).__name__}, not a `DataPosition`: "
                "pass what `Checkpoints.restore` or `BatchDataset.position` gave."
            )
        return self.beginning_at(position.step, position.schedule["fingerprint"])

    def beginning_at(self, first_step: int, continues: str | None) -> BatchSchedule:
        """Returns this schedule with another `first_step` and `continues`."""
        moved = copy.copy(self)
        moved.first_step = first_step
        moved.continues = continues
        return moved

    @property
    def opening_pairs(self) -> list[list[int]]:
        """`[[B, T, steps], ...]` of the opening; empty if there is none."""
        return [] if self._opening is None else self._opening.pairs

    @property
    def steps_per_epoch(self) -> int:
        """Steps until every example was in one row."""
        return self.flow.num_batches

    def __len__(self) -> int:
        """Steps of one epoch; larger steps are later epochs."""
        return self.steps_per_epoch

    def __iter__(self) -> Iterator[BatchIndices]:
        """The steps of the first epoch."""
        return (self[self.first_step + step] for step in range(len(self)))

    def __repr__(self) -> str:
        return (
            f"BatchSchedule({len(self.lengths)} examples, {len(self.plan)} buckets, "
            f"{self.steps_per_epoch} steps per epoch, seed={self.seed}, "
            f"order={self.order!r})"
        )

    def __getitem__(self, step: int) -> BatchIndices:
        """Returns the bucket and the rows of any step, of any epoch.

        Raises:
          IndexError: if `step` is negative, or before `first_step`.
        """
        step = operator.index(step)
        if step < 0:
            raise IndexError(f"`step={step}` must not be negative.")
        if step < self.first_step:
            raise IndexError(
                f"`step={step}` is one of the schedule that this one continues from "
                f"step {self.first_step} on."
            )
        epoch, position = divmod(step - self.first_step, self.steps_per_epoch)
        batch = self._batch_at(epoch, position)
        index = int(np.searchsorted(self._first_batch, batch, side="right")) - 1
        bucket = self.plan.buckets[index]
        first = (batch - int(self._first_batch[index])) * bucket.batch_size
        last = min(first + bucket.batch_size, int(self.flow.rows[index]))
        rows = np.full(bucket.batch_size, EMPTY_ROW, np.int64)
        rows[: last - first] = self._rows(epoch, index, np.arange(first, last))
        return BatchIndices(bucket, rows)

    def _batch_at(self, epoch: int, position: int) -> int:
        """The batch at a position of an epoch; batches are numbered by bucket."""
        opening = self._opening if epoch == 0 else None
        if self.order != "shuffled":
            order = self._fixed_order if opening is None else self._opened_order
            return int(order[position])
        planned = 0 if opening is None else opening.steps
        if opening is not None and position < planned:
            return opening.batch_at(position)
        key = fold(self.seed, epoch, len(self.plan))
        size = self.steps_per_epoch - planned
        number = int(permute(np.array([position - planned]), size, key)[0])
        return number if opening is None else opening.nth_left(number)

    def _rows(self, epoch: int, bucket: int, row: np.ndarray) -> np.ndarray:
        """The examples in the `[n]` rows of a bucket, all its batches end to end."""
        examples = np.empty(len(row), np.int64)
        missing = np.arange(len(row))
        while True:
            own = int(self.flow.counts[bucket])
            slot = row
            if self.order == "shuffled":
                size = own + int(self.flow.carried[bucket])
                slot = permute(row, size, fold(self.seed, epoch, bucket))
            here = slot < own
            found = self._offsets[bucket] + slot[here]
            examples[missing[here]] = self._examples[found]
            if here.all():
                return examples
            # Slots beyond the bucket's own are the rows that the one below left over.
            bucket -= 1
            missing = missing[~here]
            row = slot[~here] - own + int(self.flow.rows[bucket])

    @functools.cached_property
    def _fixed_order(self) -> np.ndarray:
        """`[steps]`: batches by their last example, or by their longest one."""
        keys = []
        for index, bucket in enumerate(self.plan.buckets):
            rows = self._rows(0, index, np.arange(self.flow.rows[index]))
            values = self.lengths[rows] if self.order in _BY_LENGTH else rows
            # Of all rows: those that come up may come early in the source.
            starts = np.arange(self.flow.batches[index]) * bucket.batch_size
            keys.append(np.maximum.reduceat(values.astype(np.int64), starts))
        key = np.concatenate(keys)
        if self.order == "descending":
            key = -key
        return np.argsort(key, kind="stable")

    @functools.cached_property
    def _opened_order(self) -> np.ndarray:
        assert self._opening is not None
        return self._opening.before(self._fixed_order)

    @functools.cached_property
    def data_fingerprint(self) -> str:
        """32 hex digits that name the lengths, whatever their integer dtype."""
        return digest(np.ascontiguousarray(self.lengths, "<i4").data)

    @property
    def fingerprint(self) -> str:
        """32 hex digits that name every batch: plan, lengths, seed and order."""
        parts = [
            self.plan.fingerprint,
            self.data_fingerprint,
            str(self.seed),
            self.order,
        ]
        # What is as it always was leaves no trace: old runs have these fingerprints.
        if self.remainder != "cheapest":
            parts += ["remainder", self.remainder]
        if self.opening_pairs:
            parts += ["opening", json.dumps(self.opening_pairs)]
        if self.continues is not None:
            parts += [str(self.first_step), self.continues]
        return digest("\n".join(parts).encode())


def _sort_by_length(
    examples: np.ndarray, offsets: np.ndarray, lengths: np.ndarray, order: Order
) -> None:
    """Sorts the examples of each bucket by length, in place and stably."""
    for own in np.split(examples, offsets[1:]):
        key = lengths[own].astype(np.int64)
        own[:] = own[np.argsort(-key if order == "descending" else key, kind="stable")]


def _group(index: np.ndarray, num_buckets: int) -> tuple[np.ndarray, np.ndarray]:
    """Examples by bucket, in source order within each.

    Args:
      index: `[N]` int16 bucket of each example, -1 for none.
      num_buckets: K.

    Returns:
      `[N']` uint32 examples (wider only beyond 2**32 of them), `[K]` int64 counts.
    """
    counts = np.bincount(index + 1, minlength=num_buckets + 1)
    # numpy sorts 16-bit integers by radix: one pass, whatever K.
    order = np.argsort(index, kind="stable")[counts[0] :]
    return order.astype(np.uint32 if len(index) <= 2**32 else np.int64), counts[1:]
