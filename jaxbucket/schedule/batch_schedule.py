"""Which examples fill which bucket at which step: a pure function of the step.

Nothing here advances. `schedule[step]` is computed from the plan, the lengths and the
seed alone, so every host computes the same, and resuming takes one integer.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.batch import EMPTY_ROW, BatchIndices
from jaxbucket.base.buckets import GROUPS, BucketPlan, Group
from jaxbucket.base.checks import (
    MAX_LENGTH,
    check_accumulate,
    check_choice,
    check_positive,
    check_seed,
)
from jaxbucket.packing.rows import Packing
from jaxbucket.packing.sequences import check_parts, total_lengths
from jaxbucket.plan.remainder import Remainder, RowFlow, filler_bucket
from jaxbucket.plan.reports.epoch import Report, lag1_autocorrelation, report
from jaxbucket.schedule.balance import mean_imbalance
from jaxbucket.schedule.base import Schedule
from jaxbucket.schedule.epoch_rows import EpochRows
from jaxbucket.schedule.example_draws import BatchDraws
from jaxbucket.schedule.opening import Opening, OpeningSteps
from jaxbucket.schedule.orders import Order, OrderName, check_order
from jaxbucket.schedule.packed_rows import PackedRows

# Steps of an epoch whose balance is counted.
_MOST_COUNTED = 4096


class BatchSchedule(Schedule):
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
    * a `Curriculum`: every epoch draws new batches, at every step of what is easy
      enough.
    * any other `Order`, such as a subclass of your own.

    Example:
      >>> from jaxbucket import Bucket
      >>> plan = BucketPlan((Bucket(5, 4), Bucket(2, 10)), max_tokens=20)
      >>> schedule = BatchSchedule(plan, [3, 9, 4, 8, 2, 10], order="source")
      >>> for batch in schedule:
      ...     print(batch.bucket, batch.rows)
      [2, 10] [1 3]
      [5, 4] [ 0  2  4 -1 -1]
      [2, 10] [ 5 -1]

    Of packed rows, what is said here of an example and its length is said of a row and
    the sum of its lengths: plan for `packing.row_lengths`, with `packing.seq_lens` as
    boundaries. Which examples of the same length share rows with which others is drawn
    anew in every epoch that is.

    It keeps 4 bytes per example beside `lengths`, which it refers to and does not
    copy: do not change the array afterwards.

    Attributes:
      plan: the shapes.
      lengths: `[N]` integers. Of examples with several sequences, which are packed,
        name -> `[N]` is given, and these are the sums.
      seed: any integer from 0 to 2**63 - 1.
      order: one of the orders above.
      remainder: what becomes of the examples that fill no batch: "cheapest", "promote"
        to go up always, "pad" to stay always, or "drop" to leave them out, other ones
        in every epoch unless that is always the same.
      opening: how the first epoch begins: pairs of a bucket and a number of steps, or
        "largest_first" for one batch of the bucket with the most tokens. The rest of
        that epoch follows in order.
      accumulate: micro-batches of a step, which is a tuple of them if it is not 1.
      packing: rows of several examples, by `pack`; None for rows of one.
      group: whether the micro-batches of a step have the "same" bucket, as pipelines
        need it, or are "mixed", one after another in order. Those of one bucket are
        filled up together, and may be empty at their end; mixed ones are filled up
        each for itself, and the last step of an epoch is made full by empty ones.
      flow: how many rows and batches every bucket has in one epoch; those of the same
        bucket in a step count as one.
      first_step: the step that its first epoch begins with; 0, but for a schedule made
        by `continue_with`.
      continues: fingerprint of the schedule that has the steps before; None if none.

    Raises:
      ValueError: for lengths the plan refuses or drops altogether, an unknown order,
        remainder or group, an opening that the epoch has not, or a seed out of range;
        for a packing of other lengths, one whose rows the plan does not hold, or one
        that is given with a `Curriculum`.
    """

    def __init__(
        self,
        plan: BucketPlan,
        lengths: ArrayLike | Mapping[str, ArrayLike],
        *,
        seed: int = 0,
        order: OrderName | Order = "shuffled",
        remainder: Remainder = "cheapest",
        opening: Opening | None = None,
        accumulate: int = 1,
        group: Group = "same",
        packing: Packing | None = None,
    ):
        check_choice("group", group, GROUPS)
        self.plan = plan
        if isinstance(lengths, Mapping):
            self.parts = _check_packed_parts(lengths, packing)
            lengths = total_lengths(self.parts)
        self.lengths = plan.check(lengths)
        is_packed = packing is not None
        self._order = check_order(order, len(self.lengths), is_packed=is_packed)
        self.order: OrderName | Order = order
        self.seed = check_seed(seed)
        self.packing = packing
        self._row_lengths, self._packed = self.lengths, None
        if packing is not None:
            _check_packing(packing, plan)
            self.max_segments = packing.max_segments
            self.capacities = packing.capacities
            self._row_lengths = packing.row_lengths
            drawn = self.seed if self._order.is_redrawn else None
            self._packed = PackedRows(packing, self.lengths, self.parts, drawn)
        self.remainder: Remainder = remainder
        if opening is not None and not isinstance(opening, str):
            opening = list(opening)
        self.opening: Opening | None = opening
        self.accumulate = check_accumulate(accumulate)
        self.group: Group = group
        # A step is one high batch of one bucket, or several batches of any.
        batches_together = self.accumulate if group == "same" else 1
        self._batches_per_step = self.accumulate // batches_together
        self._rows = EpochRows(
            plan,
            self._row_lengths,
            remainder=remainder,
            within=self._order.within,
            group=batches_together,
        )
        self._opening = (
            OpeningSteps(plan, self.flow.batches, opening, self._batches_per_step)
            if opening
            else None
        )
        self._epochs = self._order.epoch_order(
            self._rows, self._row_lengths, self.seed, self._opening
        )

    @property
    def flow(self) -> RowFlow:
        """How many rows and batches every bucket has in one epoch."""
        return self._rows.flow

    @property
    def opening_pairs(self) -> list[list[int]]:
        """`[[B, T, batches], ...]` of the opening; empty if there is none."""
        return [] if self._opening is None else self._opening.pairs

    @property
    def steps_per_epoch(self) -> int:
        return -(-self._rows.num_batches // self._batches_per_step)

    def __repr__(self) -> str:
        micro = f", {self.accumulate} micro-batches" if self.accumulate > 1 else ""
        rows = f" in {self.packing.num_rows} rows" if self.packing else ""
        return (
            f"BatchSchedule({len(self.lengths)} examples{rows}, "
            f"{len(self.plan)} buckets, "
            f"{self.steps_per_epoch} steps per epoch{micro}, seed={self.seed}, "
            f"order={self.order!r})"
        )

    def _micro_batches(self, step: int) -> tuple[BatchIndices, ...]:
        epoch, position = divmod(step, self.steps_per_epoch)
        first = position * self._batches_per_step
        numbers = range(first, first + self._batches_per_step)
        return tuple(part for n in numbers for part in self._batches(epoch, n))

    def _draws(self, step: int) -> tuple[BatchDraws, ...]:
        epoch, position = divmod(step, self.steps_per_epoch)
        first = position * self.accumulate
        numbers = range(first, first + self.accumulate)
        repeats = self._order.replacement
        return tuple(
            BatchDraws(self.seed, epoch, number if repeats else None)
            for number in numbers
        )

    def _batches(self, epoch: int, number: int) -> list[BatchIndices]:
        """A batch of the order, cut into the micro-batches that it counts for."""
        if number >= self._rows.num_batches:
            return [self._filler]
        index, examples = self._epochs.batch(epoch, number)
        bucket = self.plan.buckets[index]
        rows = np.full(int(self._rows.sizes[index]), EMPTY_ROW, np.int64)
        rows[: len(examples)] = examples
        parts = rows.reshape(-1, bucket.batch_size)
        if self._packed is None:
            return [BatchIndices(bucket, part) for part in parts]
        packed = self._packed
        return [BatchIndices(bucket, packed.examples(epoch, part)) for part in parts]

    @functools.cached_property
    def _filler(self) -> BatchIndices:
        """An empty batch, of the bucket that costs the least."""
        bucket = filler_bucket(self.plan)
        segments = () if self.max_segments is None else (self.max_segments,)
        shape = (bucket.batch_size, *segments)
        return BatchIndices(bucket, np.full(shape, EMPTY_ROW, np.int64))

    def report(self, epoch: int = 0) -> Report:
        """Returns what an epoch costs, exactly, and how its batches follow each other.

        Where other examples are dropped in every epoch, real tokens are the mean, and
        so are the examples of packed rows.

        Example:
          >>> from jaxbucket import Bucket
          >>> plan = BucketPlan((Bucket(2, 4), Bucket(1, 8)), max_tokens=8)
          >>> lengths = [4] * 8 + [8] * 4
          >>> BatchSchedule(plan, lengths, order="ascending").report().autocorrelation
          0.625

        Raises:
          ValueError: if it draws with replacement.
        """
        seq_lens = self.plan.boundaries[self._epochs.buckets(epoch)]
        return dataclasses.replace(
            self.cost(), autocorrelation=lag1_autocorrelation(seq_lens)
        )

    def cost(self) -> Report:
        """Returns the same, but for what follows what.

        Raises:
          ValueError: if it draws with replacement.
        """
        if self._order.replacement:
            raise ValueError(
                "A report counts an epoch that has every example once, which one with "
                "`replacement=True` has not. Count its batches."
            )
        epoch = report(
            self.plan,
            self._row_lengths,
            remainder=self.remainder,
            accumulate=self.accumulate,
            group=self.group,
        )
        rows = self._fixed_rows()
        if self.packing is not None:
            share = epoch.examples / self.packing.num_rows
            packed = round(share * self.packing.num_examples)
            if rows is not None:
                packed = int(self.packing.row_segments[rows].sum())
            epoch = dataclasses.replace(epoch, packed_examples=packed)
        if rows is None:
            return epoch
        longest = min(self.plan.max_seq_len, MAX_LENGTH)
        lengths = np.minimum(self._row_lengths[rows], longest)
        return epoch.with_real_tokens(int(lengths.sum()))

    def imbalance(self, num_devices: int, epoch: int = 0) -> float:
        """Returns what the busiest device does by what all do on average.

        Of attention within examples, whose work is the sum of their squared lengths:
        the mean over the batches of an epoch, of 4,096 at most.

        Example:
          >>> from jaxbucket import plan_buckets
          >>> from jaxbucket.packing import pack
          >>> lengths = np.random.default_rng(0).integers(1, 100, 1000)
          >>> packing = pack(lengths, 128)
          >>> plan = plan_buckets([128], max_tokens=32 * 128)
          >>> schedule = BatchSchedule(plan, lengths, packing=packing)
          >>> print(f"{schedule.imbalance(num_devices=8):.2f}")
          1.05

        Raises:
          ValueError: if the devices do not divide a bucket's B.
        """
        check_positive("num_devices", num_devices)
        for bucket in self.plan.buckets:
            if bucket.batch_size % num_devices:
                raise ValueError(
                    f"`num_devices={num_devices}` do not divide the rows of bucket "
                    f"{bucket}. Plan with that `batch_size_multiple`."
                )
        parts = [self.lengths] if self.parts is None else self.parts.values()
        work = np.sum([np.square(x, dtype=np.int64) for x in parts], axis=0)
        first = epoch * len(self)
        steps = range(first, first + min(len(self), _MOST_COUNTED))
        batches = (x for step in steps for x in self._micro_batches(step))
        return mean_imbalance(batches, work, num_devices)

    def _fixed_rows(self) -> np.ndarray | None:
        """The rows of every epoch, where all leave out the same; None otherwise."""
        if self.remainder != "drop" or self._order.is_redrawn:
            return None
        num_rows = enumerate(self.flow.rows.tolist())
        rows = [self._rows.bucket_examples(k)[:number] for k, number in num_rows]
        return np.concatenate(rows)

    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "seed": self.seed,
            "order": str(self._order),
            "remainder": self.remainder,
            "opening": self.opening_pairs,
        }
        if self.accumulate > 1:
            config |= {"accumulate": self.accumulate, "group": self.group}
        if self.packing is not None:
            config["packing"] = self.packing.fingerprint
        return config

    def _fingerprint_parts(self) -> list[str]:
        parts = [str(self.seed), str(self._order)]
        # Defaults leave no trace, because runs that knew no options have none of them.
        if self.remainder != "cheapest":
            parts += ["remainder", self.remainder]
        if self.opening_pairs:
            parts += ["opening", json.dumps(self.opening_pairs)]
        if self.accumulate > 1:
            parts += ["accumulate", str(self.accumulate), self.group]
        if self.packing is not None:
            parts += ["packing", self.packing.fingerprint]
        return parts


def _check_packed_parts(
    lengths: Mapping[str, ArrayLike], packing: Packing | None
) -> dict[str, np.ndarray]:
    if packing is None:
        raise ValueError(
            f"`lengths` are those of several sequences, {sorted(lengths)}, which are "
            "bucketed where they are packed: give the `packing` that "
            "`jb.packing.pack(lengths, max_seq_len)` made."
        )
    return check_parts(lengths)


def _check_packing(packing: Any, plan: BucketPlan) -> None:
    if not isinstance(packing, Packing):
        raise ValueError(
            f"`packing` is a {type(packing).__name__}: make it by "
            "`jb.packing.pack(lengths, max_seq_len)`."
        )
    longest = int(packing.row_lengths.max())
    if longest > plan.max_seq_len:
        raise ValueError(
            f"`packing` has rows of {longest} tokens, beyond the last bucket, "
            f"`seq_len={plan.max_seq_len}`. Plan for `packing.row_lengths`, with "
            "`boundaries=packing.seq_lens`."
        )
    if packing.capacities is not None and plan.boundaries.tolist() != [
        *packing.seq_lens
    ]:
        raise ValueError(
            f"`plan` has T of {plan.boundaries.tolist()}, and rows of `packing` hold "
            f"{packing.capacities}, {packing.seq_lens[0]} together: plan with "
            "`boundaries=packing.seq_lens`."
        )
