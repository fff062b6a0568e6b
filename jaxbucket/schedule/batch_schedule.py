"""The batch schedule: which examples fill which bucket at which step."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.batch import EMPTY_ROW, BatchIndices
from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.checks import (
    check_accumulate,
    check_choice,
    check_seed,
    selected_indices,
)
from jaxbucket.base.digest import digest
from jaxbucket.base.policies import GROUPS, Group
from jaxbucket.base.shared_array import SharedArray
from jaxbucket.base.sizes import Lengths, any_lengths, total_lengths
from jaxbucket.packing.rows import Packing
from jaxbucket.plan.flow.remainder import Remainder, RowFlow
from jaxbucket.plan.reports.epoch import Report
from jaxbucket.plan.tally import Tally
from jaxbucket.schedule.balance import balance_rows
from jaxbucket.schedule.base import Schedule, check_step
from jaxbucket.schedule.epoch_rows import EpochRows
from jaxbucket.schedule.example_draws import BatchDraws
from jaxbucket.schedule.orders import Order, OrderName, check_order
from jaxbucket.schedule.packed_rows import PackedRows, row_lengths


class BatchSchedule(Schedule):
    """An endless sequence of batches, computed from lengths, a plan and a seed.

    Within an epoch every example that the plan keeps is in exactly one row. Examples
    that do not fill the last batch of their bucket either move up into a longer bucket
    or form one batch with empty rows, whichever costs less. Set `remainder` to choose
    one of these yourself.

    Orders:

    * "spread": every epoch draws new batches, by keyed integer permutations, which need
      neither a pass over the data nor a state. The buckets are spread evenly over the
      steps, so that consecutive updates differ in length as much as the data does. All
      epochs have the same sequence of buckets.
    * "shuffled": the same, but the batches come in a random order.
    * "source": every epoch is the same. Each bucket takes its examples in source
      order, and a batch comes as soon as it is full.
    * "ascending", "descending": every epoch is the same. Each bucket takes its examples
      by length, and batches are sorted by the length of their longest example.
    * `GroupedByLength()`: every epoch draws new batches, whose examples have similar
      lengths. The buckets are spread as in "spread".
    * a `Curriculum`: every epoch draws new batches, and every step draws from the
      examples that are easy enough.
    * any other subclass of `Order`, such as your own.

    Example:
      >>> from jaxbucket import Bucket
      >>> plan = BucketPlan((Bucket(5, 4), Bucket(2, 10)), max_tokens=20)
      >>> schedule = BatchSchedule(plan, [3, 9, 4, 8, 2, 10], order="source")
      >>> for batch in schedule:
      ...     print(batch.bucket, batch.rows)
      [2, 10] [1 3]
      [5, 4] [ 0  2  4 -1 -1]
      [2, 10] [ 5 -1]

    With packed rows, "example" and "length" above mean a row and the sum of its
    lengths. Plan for `packing.row_lengths` with `boundaries=packing.seq_lens`. If the
    order redraws epochs, examples of the same length also swap rows in every epoch. A
    `Curriculum` puts easy examples into the same rows, and a row is open when all of
    its examples are.

    A schedule stores 4 bytes per example. It refers to the `lengths` of one sequence
    instead of copying the array, so do not modify the array afterwards. If `lengths` is
    a memory map, such as `np.load("lengths.npy", mmap_mode="r")` of uint16, these 4
    bytes are in a file beside it, too, which is written once (`lengths-*.rows.npy`), so
    that all processes of a host share one copy of both.

    Attributes:
      plan: the buckets.
      lengths: `[N]` integers, one per example. For examples with several sequences,
        pass sequence name -> `[N]`; the attribute holds the sums.
      seed: an integer from 0 to 2**63 - 1.
      order: one of the orders above.
      remainder: the policy for examples that do not fill a batch: "cheapest" as above,
        "promote" to always move them up, "pad" to always keep them in their bucket,
        "drop" to leave them out, or "repeat" for "cheapest" without empty rows: these
        repeat the examples of their batch evenly, which then count more than others.
        If epochs are redrawn, each drops or repeats different examples.
      largest_first: whether the first epoch starts with a batch of the bucket with the
        most tokens, so that a lack of memory becomes apparent immediately. Its other
        batches follow in the usual order.
      accumulate: the number of micro-batches in a step; if it is not 1,
        `schedule[step]` is a tuple.
      packing: rows of several examples, created by `pack`; None for one example per
        row.
      balance: whether to order the rows of a batch so that devices have about the same
        work of attention within examples. Packed rows always are.
      subset: `[N]` bool, the examples that take part, or their indices; None for all.
        The other lengths may be longer than the plan allows. With a `Curriculum`, its
        difficulties are those of all N examples, and shares are those of the subset.
        A `packing` is that of the lengths of the subset.
      group: "same" if all micro-batches of a step share a bucket, as pipeline
        parallelism requires, or "mixed" if a step takes consecutive batches of the
        order; if that spreads buckets, these are short and long. With "same", the
        micro-batches of a step are filled together, and the last ones may be empty.
        With "mixed", each is filled separately, and empty batches complete the last
        step of an epoch.
      flow: the number of rows and batches of every bucket in one epoch. Micro-batches
        that share a step because of `group="same"` count as one batch.

    Raises:
      ValueError: if the plan refuses the lengths or no example is left; if `order`,
        `remainder` or `group` is unknown; if `seed` is out of range; if `packing` is
        for different lengths, does not fit the plan, or is missing for a plan for
        packed rows; if a `Curriculum` with replacement is combined with `packing` or
        `largest_first`; if `subset` selects no example, or is not `[N]` bool or
        different indices.
    """

    def __init__(
        self,
        plan: BucketPlan,
        lengths: Lengths,
        *,
        seed: int = 0,
        order: OrderName | Order = "spread",
        remainder: Remainder = "cheapest",
        largest_first: bool = False,
        accumulate: int = 1,
        group: Group = "same",
        packing: Packing | None = None,
        balance: bool = False,
        subset: ArrayLike | None = None,
    ):
        check_choice("group", group, GROUPS)
        self.plans = (plan,)
        if plan.packed and packing is None:
            raise ValueError(
                "`plan` is for packed rows. Pass the `packing` of the same call, or "
                "`packing=jb.packing.pack(lengths, [x.seq_len for x in plan.buckets], "
                "overlong=plan.overlong)` with its `max_segments_per_row`; or use "
                "`plan.unpacked` to have one example per row."
            )
        columns, self.subset = _selected(plan, lengths, subset)
        whole = SharedArray.of(lengths)
        if whole is not None and whole.dtype == columns.dtype:
            columns = whole
        self.lengths = total_lengths(columns)
        if plan.sequences:
            self.parts = dict(zip(plan.sequences, columns.T, strict=True))
        self._order = check_order(order, len(self.lengths))
        self.order: OrderName | Order = order
        self.seed = check_seed(seed)
        self.packing = packing
        self.balance = bool(balance)
        self.remainder: Remainder = remainder
        self.largest_first = bool(largest_first)
        if self._order.replacement and (largest_first or packing is not None):
            raise ValueError(
                "`order` draws examples with `replacement=True`, which cannot be "
                "combined with `packing` or `largest_first`. Remove one of the two."
            )
        self.accumulate = check_accumulate(accumulate)
        self.group: Group = group
        self._set_rows(columns, lengths)
        first = self._largest_batch() if largest_first else None
        self._epochs = self._order.epoch_order(
            self._rows, total_lengths(self._row_lengths), self.seed, first
        )

    def _largest_batch(self) -> int:
        """Returns the number of the first batch of the bucket with the most tokens."""
        buckets, batches = self.plan.buckets, self.flow.batches

        # For equal numbers of tokens, the longest rows, which come last, cost the most.
        used = reversed(np.flatnonzero(batches).tolist())
        return int(batches[: max(used, key=lambda k: buckets[k].num_tokens)].sum())

    def _set_rows(self, columns: np.ndarray, lengths: Lengths) -> None:
        """Assigns the examples, or packed rows, to the rows of batches.

        Args:
          columns: `[N]` lengths, or `[N, Q]` of several sequences.
          lengths: the argument of the user.
        """
        plan, packing = self.plan, self.packing
        # `[R]`, or `[R, Q]` with a column for each of several sequences.
        self._row_lengths, self._packed_rows = columns, None
        if packing is not None:
            self._row_lengths = row_lengths(packing, plan)
            self.max_segments = packing.max_segments
            slot_seed = self.seed if self._order.is_redrawn else None
            is_kept = None if (kept := self.is_kept).all() else kept
            difficulty = self._order.slot_difficulty(is_kept)
            self._packed_rows = PackedRows(
                packing, plan, columns, is_kept, slot_seed, difficulty
            )
        self._rows = EpochRows(
            plan if packing is None else plan.unpacked,
            self._row_lengths,
            remainder=self.remainder,
            within=self._order.within,
            accumulate=self.accumulate,
            group=self.group,
            packed=self._packed_rows,
            subset=self.subset if packing is None else None,
            stored=self._stored(lengths) if packing is None else None,
        )

    def _stored(self, lengths: Any) -> pathlib.Path | None:
        """Returns the file of what processes of a host share, or None without a map."""
        if not isinstance(lengths, np.memmap) or lengths.filename is None:
            return None
        what = [self._order.within, self.plan.fingerprint, self.data_fingerprint]
        what.append(self.config()["subset"] or "")
        path = pathlib.Path(lengths.filename)
        return path.with_name(f"{path.stem}-{digest(repr(what).encode())}.rows.npy")

    @property
    def flow(self) -> RowFlow:
        """The number of rows and batches of every bucket in one epoch."""
        return self._rows.flow

    @property
    def steps_per_epoch(self) -> int:
        return self._rows.steps_per_epoch

    def __repr__(self) -> str:
        micro = f", {self.accumulate} micro-batches" if self.accumulate > 1 else ""
        rows = f" in {self.packing.num_rows} rows" if self.packing else ""
        return (
            f"BatchSchedule({len(self.lengths)} examples{rows}, "
            f"{len(self.plan)} buckets, "
            f"{self.steps_per_epoch} steps per epoch{micro}, seed={self.seed}, "
            f"order={self.order!r})"
        )

    def drawn_batches(self, step: int) -> Iterator[tuple[BatchIndices, BatchDraws]]:
        epoch, epoch_step = divmod(check_step(step), self.steps_per_epoch)
        positions = self._rows.positions(epoch_step)
        batches = (part for x in positions for part in self._batches(epoch, x))
        repeats = self._order.replacement or self.remainder == "repeat"
        for number, indices in enumerate(batches, epoch_step * self.accumulate):
            yield indices, BatchDraws(self.seed, epoch, number if repeats else None)

    def _batches(self, epoch: int, position: int) -> list[BatchIndices]:
        """Returns the micro-batches of the batch at a position of the order."""
        repeats = self.remainder == "repeat"
        if position >= self._rows.num_batches and not repeats:
            return [self._filler]
        index, examples = self._epochs.batch(epoch, position % self._rows.num_batches)
        bucket = self.plan.buckets[index]
        rows = np.resize(examples, int(self._rows.sizes[index]))
        if not repeats:
            rows[len(examples) :] = EMPTY_ROW
        parts = rows.reshape(-1, bucket.batch_size)
        if (packed := self._packed_rows) is None:
            if self.balance:
                parts = [part[balance_rows(self._row_work(part))] for part in parts]
            return [BatchIndices(bucket, part) for part in parts]
        return [BatchIndices(bucket, packed.examples(epoch, part)) for part in parts]

    @functools.cached_property
    def _filler(self) -> BatchIndices:
        """An empty batch of the cheapest bucket."""
        bucket = self.plan.buckets[self.plan.filler]
        segments = () if self.max_segments is None else (self.max_segments,)
        shape = (bucket.batch_size, *segments)
        return BatchIndices(bucket, np.full(shape, EMPTY_ROW, np.int64))

    def report(self) -> Report:
        """Returns the exact cost of an epoch.

        If each epoch drops different examples, the real tokens and the examples of
        packed rows are means over the epochs.

        Example:
          >>> from jaxbucket import Bucket
          >>> plan = BucketPlan((Bucket(2, 4), Bucket(1, 8)), max_tokens=8)
          >>> BatchSchedule(plan, [4] * 7 + [8] * 4).report().steps_per_epoch
          8

        Raises:
          ValueError: if the order draws with replacement.
        """
        if self._order.replacement:
            raise ValueError(
                "With `replacement=True`, an epoch has no exact numbers. Count the "
                "rows of its batches instead: `schedule.micro_batches(step)`."
            )
        lengths, columns, others = self._row_lengths, self.columns, 0
        if self.subset is not None:
            others = int(np.count_nonzero(~self.subset))
            columns = columns[self.subset]
            lengths = columns if self.packing is None else lengths
        epoch = self._rows.report(lengths)
        epoch = dataclasses.replace(epoch, unselected_examples=others)
        rows = self._fixed_rows()
        if self.packing is not None:
            # Without `rows`, an epoch may have any of them.
            packed = epoch.examples / self.packing.num_rows * self.packing.num_examples
            if rows is not None:
                packed = self.packing.row_segments[rows].sum()
            changes = Tally.of(self.plan, columns).changes
            epoch = dataclasses.replace(epoch, packed_examples=round(packed), **changes)
        if rows is None:
            return epoch
        lengths = self._rows.plan.kept_lengths(self._row_lengths[rows])
        return epoch.with_lengths(lengths)

    def device_work(self, step: int, num_devices: int) -> np.ndarray:
        """Returns the work of each device at a step, `[num_devices]` int64.

        The work is that of attention within examples, the sum of their squared lengths,
        added up over the micro-batches. Log its maximum divided by its mean.

        Example:
          >>> from jaxbucket import plan_buckets
          >>> plan = plan_buckets([8], max_tokens=16, sample=True)
          >>> schedule = BatchSchedule(plan, [8, 3])
          >>> sorted(schedule.device_work(step=0, num_devices=2).tolist())
          [9, 64]

        Args:
          step: the step, counted over all epochs.
          num_devices: the number of devices that share the rows of a batch, in order.
            It divides every batch size.

        Raises:
          IndexError: if `step` is negative.
        """
        parts = [x.rows.reshape(num_devices, -1) for x in self.micro_batches(step)]
        return np.sum([self._row_work(x).sum(axis=1) for x in parts], axis=0)

    @functools.cached_property
    def _work(self) -> np.ndarray:
        """`[N]` int64, the number of query-key pairs of attention in each example."""
        kept = self.plan.truncated(self.columns).reshape(len(self.lengths), -1)
        return np.square(kept, dtype=np.int64).sum(axis=1)

    def _row_work(self, rows: np.ndarray) -> np.ndarray:
        return np.where(rows == EMPTY_ROW, 0, self._work[rows])

    def _fixed_rows(self) -> np.ndarray | None:
        """Returns the rows of every epoch if all epochs drop the same, else None."""
        if self.remainder != "drop" or self._order.is_redrawn:
            return None
        num_rows = enumerate(self.flow.rows.tolist())
        rows = [self._rows.bucket_examples(k)[:number] for k, number in num_rows]
        return np.concatenate(rows)

    def config(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "order": str(self._order),
            "remainder": self.remainder,
            "largest_first": self.largest_first,
            "accumulate": self.accumulate,
            "group": self.group,
            "balance": self.balance,
            "packing": self.packing and self.packing.fingerprint,
            "subset": None
            if self.subset is None
            else digest(np.packbits(self.subset).data),
        }


def _selected(
    plan: BucketPlan, lengths: Lengths, subset: ArrayLike | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns the lengths, `[N]` or `[N, Q]`, and the subset, `[N]` bool or None.

    Args:
      plan: the plan, which has to hold the examples of the subset only.
      lengths: `[N]` integers, or sequence name -> `[N]` integers.
      subset: `[N]` bool, or the indices of the examples; None for all of them.
    """
    if subset is None:
        return plan.check(lengths), None
    columns = any_lengths(lengths, plan.sequences)
    indices = selected_indices("subset", subset, len(columns))
    is_selected = np.zeros(len(columns), bool)
    is_selected[indices] = True
    if np.count_nonzero(is_selected) < len(indices):
        raise ValueError(
            "`subset` has an index twice. Pass different ones, because an epoch has "
            "each example once."
        )
    # Every plan holds the other examples if their lengths are 1.
    mask = is_selected if columns.ndim == 1 else is_selected[:, None]
    plan.check(np.where(mask, columns, np.ones_like(columns, shape=())))
    return columns, is_selected
