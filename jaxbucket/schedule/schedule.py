"""Which examples fill which bucket at which step: a pure function of the step.

Nothing here advances. `schedule[step]` is computed from the plan, the lengths and the
seed alone, so every host computes the same, and resuming takes one integer.
"""

from __future__ import annotations

import abc
import copy
import dataclasses
import functools
import json
import operator
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self, TypeAlias, get_args

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.batch import EMPTY_ROW, BatchIndices
from jaxbucket.base.buckets import GROUPS, Bucket, BucketPlan, Group
from jaxbucket.base.checks import (
    MAX_LENGTH,
    check_accumulate,
    check_choice,
    check_positive,
    check_seed,
)
from jaxbucket.base.digest import digest
from jaxbucket.base.position import DataPosition, check_position
from jaxbucket.packing.rows import Packing
from jaxbucket.packing.sequences import check_parts, total_lengths
from jaxbucket.plan.remainder import Remainder, RowFlow, filler_bucket
from jaxbucket.plan.reports.epoch import Report, lag1_autocorrelation, report
from jaxbucket.schedule.balance import imbalance
from jaxbucket.schedule.curriculum import Curriculum, EasyDraws, PacedOrder
from jaxbucket.schedule.epoch_rows import EpochRows
from jaxbucket.schedule.example_draws import BatchDraws
from jaxbucket.schedule.opening import Opening, OpeningSteps
from jaxbucket.schedule.orders import EpochOrder, FixedOrder, ShuffledOrder
from jaxbucket.schedule.packed_rows import PackedRows

FixedName: TypeAlias = Literal["source", "ascending", "descending"]
Order: TypeAlias = Literal["shuffled"] | FixedName | Curriculum

# In search of the first step of every bucket.
_MOST_LOOKED_AT = 4096
ORDERS: tuple[str, ...] = ("shuffled", *get_args(FixedName))


class Schedule(abc.ABC):
    """Step -> `BatchIndices`, or a tuple of `accumulate` of them; without end.

    Attributes:
      plan: the shapes.
      lengths: `[N]` integers.
      accumulate: micro-batches of a step.
      max_segments: the most examples of a packed row; None where a row has one example.
      capacities: what a row holds of each sequence, where examples have several.
      parts: name -> `[N]` integers, the lengths of each of these; they add up to
        `lengths`.
      first_step: the step that its first epoch begins with; 0, but for a schedule made
        by `continue_with`.
      continues: fingerprint of the schedule that has the steps before; None if none.
    """

    plan: BucketPlan
    lengths: np.ndarray
    accumulate: int = 1
    max_segments: int | None = None
    capacities: dict[str, int] | None = None
    parts: dict[str, np.ndarray] | None = None
    first_step: int = 0
    continues: str | None = None

    @property
    @abc.abstractmethod
    def steps_per_epoch(self) -> int:
        """Steps until every example was in one row."""

    @abc.abstractmethod
    def _micro_batches(self, step: int) -> tuple[BatchIndices, ...]:
        """Those of a step, counted from `first_step` on."""

    @abc.abstractmethod
    def _draws(self, step: int) -> tuple[BatchDraws, ...]:
        """What is random in the examples of each of them."""

    @abc.abstractmethod
    def traits(self) -> dict[str, Any]:
        """What it does beside the plan and the lengths, as plain Python."""

    @abc.abstractmethod
    def _named(self) -> list[str]:
        """What its fingerprint is made of, beside the plan and the lengths."""

    def continue_with(self, position: DataPosition) -> Self:
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
        check_position(position)
        return self.beginning_at(position.step, position.schedule["fingerprint"])

    def beginning_at(self, first_step: int, continues: str | None) -> Self:
        """Returns this schedule with another `first_step` and `continues`."""
        moved = copy.copy(self)
        moved.first_step = first_step
        moved.continues = continues
        return moved

    def __len__(self) -> int:
        """Steps of one epoch; larger steps are later epochs."""
        return self.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        """The steps of the first epoch."""
        return (self[self.first_step + step] for step in range(len(self)))

    def __getitem__(self, step: int) -> Any:
        """Returns the bucket and the rows of any step, of any epoch.

        One `BatchIndices`, or a tuple of `accumulate` of them if that is not 1.

        Raises:
          IndexError: if `step` is negative, or before `first_step`.
        """
        micro = self.micro_batches(step)
        return micro[0] if self.accumulate == 1 else micro

    def micro_batches(self, step: int) -> tuple[BatchIndices, ...]:
        """Returns the same as a tuple, however many there are.

        Raises:
          IndexError: if `step` is negative, or before `first_step`.
        """
        return self._micro_batches(self._checked(step) - self.first_step)

    def draws(self, step: int) -> tuple[BatchDraws, ...]:
        """Returns the random numbers of the examples of each micro-batch of a step.

        Raises:
          IndexError: if `step` is negative, or before `first_step`.
        """
        first = self.first_step
        draws = self._draws(self._checked(step) - first)
        return tuple(one._replace(first_step=first) for one in draws)

    def bucket_order(self, start_step: int = 0) -> list[Bucket]:
        """Returns the buckets in the order in which steps first come to them.

        For `compile_steps(..., opening=)`. Those that thousands of steps do not come
        to are last, the longest first.

        Example:
          >>> from jaxbucket import plan_buckets
          >>> lengths = [2] * 9 + [9] * 2
          >>> plan = plan_buckets(lengths, max_tokens=18, num_buckets=2)
          >>> print(*BatchSchedule(plan, lengths, order="descending").bucket_order())
          [2, 9] [9, 2]

        Raises:
          IndexError: if `start_step` is negative, or before `first_step`.
        """
        found: dict[Bucket, None] = {}
        for step in range(start_step, start_step + min(len(self), _MOST_LOOKED_AT)):
            found.update(dict.fromkeys(x.bucket for x in self.micro_batches(step)))
            if len(found) == len(self.plan):
                break
        rest = reversed(self.plan.buckets)
        return list(dict.fromkeys([*found, *rest]))

    def epoch_at(self, step: int) -> int:
        """Returns the epoch that a step is in, from 0 on: derived, never kept.

        Raises:
          IndexError: if `step` is negative, or before `first_step`.
        """
        return (self._checked(step) - self.first_step) // len(self)

    def _checked(self, step: int) -> int:
        step = operator.index(step)
        if step < 0:
            raise IndexError(f"`step={step}` must not be negative.")
        if step < self.first_step:
            raise IndexError(
                f"`step={step}` is one of the schedule that this one continues from "
                f"step {self.first_step} on."
            )
        return step

    @functools.cached_property
    def data_fingerprint(self) -> str:
        """32 hex digits that name the lengths, whatever their integer dtype."""
        every = [self.lengths] if self.parts is None else self.parts.values()
        return digest(*(np.ascontiguousarray(own, "<i4").data for own in every))

    @property
    def fingerprint(self) -> str:
        """32 hex digits that name every batch: plan, lengths, and all traits."""
        parts = [self.plan.fingerprint, self.data_fingerprint, *self._named()]
        if self.continues is not None:
            parts += [str(self.first_step), self.continues]
        return digest("\n".join(parts).encode())


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
        order: Order = "shuffled",
        remainder: Remainder = "cheapest",
        opening: Opening | None = None,
        accumulate: int = 1,
        group: Group = "same",
        packing: Packing | None = None,
    ):
        check_choice("group", group, GROUPS)
        self.plan = plan
        if isinstance(lengths, Mapping):
            self.parts = _packed_parts(lengths, packing)
            lengths = total_lengths(self.parts)
        self.lengths = plan.check(lengths)
        _check_order(order, len(self.lengths))
        self.seed = check_seed(seed)
        self.packing = packing
        self._row_lengths, self._packed = self.lengths, None
        if packing is not None:
            _check_packing(packing, plan, order)
            self.max_segments = packing.max_segments
            self.capacities = packing.capacities
            self._row_lengths = packing.row_lengths
            drawn = self.seed if order == "shuffled" else None
            self._packed = PackedRows(packing, self.lengths, self.parts, drawn)
        self.order: Order = order
        self.remainder: Remainder = remainder
        if opening is not None and not isinstance(opening, str):
            opening = list(opening)
        self.opening: Opening | None = opening
        self.accumulate = check_accumulate(accumulate)
        self.group: Group = group
        # Of one bucket, a step is one batch of the order; of several, so many.
        together = self.accumulate if group == "same" else 1
        self._batches_per_step = self.accumulate // together
        self._rows = EpochRows(
            plan,
            self._row_lengths,
            remainder=remainder,
            within=_within(order),
            group=together,
        )
        self._opening = (
            OpeningSteps(plan, self.flow.batches, opening, self._batches_per_step)
            if opening
            else None
        )
        self._order = self._make_order()

    def _make_order(self) -> EpochOrder:
        order, rows, opening = self.order, self._rows, self._opening
        if order == "shuffled":
            return ShuffledOrder(rows, self.seed, opening)
        if not isinstance(order, Curriculum):
            by_length = None if order == "source" else self._row_lengths
            return FixedOrder(rows, by_length, order == "descending", opening)
        if not order.replacement:
            return PacedOrder(order, rows, self.lengths, self.seed, opening)
        if opening is not None:
            raise ValueError(
                "`opening` plans the beginning of an epoch that has every example "
                "once, which one with `replacement=True` has not. Leave out either."
            )
        return EasyDraws(order, rows, self.lengths, self.seed)

    @property
    def flow(self) -> RowFlow:
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
        repeats = isinstance(self.order, Curriculum) and self.order.replacement
        return tuple(
            BatchDraws(self.seed, epoch, number if repeats else None)
            for number in numbers
        )

    def _batches(self, epoch: int, number: int) -> list[BatchIndices]:
        """A batch of the order, cut into the micro-batches that it counts for."""
        if number >= self._rows.num_batches:
            return [self._filler]
        index, examples = self._order.batch(epoch, number)
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
        seq_lens = self.plan.boundaries[self._order.buckets(epoch)]
        return dataclasses.replace(
            self.cost(), autocorrelation=lag1_autocorrelation(seq_lens)
        )

    def cost(self) -> Report:
        """Returns the same, but for what follows what.

        Raises:
          ValueError: if it draws with replacement.
        """
        if isinstance(self.order, Curriculum) and self.order.replacement:
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
        if self.packing is not None:
            share = epoch.examples / self.packing.num_rows
            packed = round(share * self.packing.num_examples)
            if self._drops_the_same():
                packed = int(self.packing.row_segments[self._kept_rows()].sum())
            epoch = dataclasses.replace(epoch, packed_examples=packed)
        if self._drops_the_same():
            longest = min(self.plan.max_seq_len, MAX_LENGTH)
            kept = np.minimum(self._row_lengths, longest)
            return epoch.with_real_tokens(int(kept[self._kept_rows()].sum()))
        return epoch

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
        every = [self.lengths] if self.parts is None else self.parts.values()
        squares = np.sum([np.square(own, dtype=np.int64) for own in every], axis=0)
        found = []
        for step in range(min(len(self), _MOST_LOOKED_AT)):
            for indices in self._micro_batches(epoch * len(self) + step):
                rows = indices.rows.reshape(indices.bucket.batch_size, -1)
                work = np.where(rows == EMPTY_ROW, 0, squares[rows]).sum(axis=1)
                found.append(imbalance(work, num_devices))
        return float(np.mean(found))

    def _drops_the_same(self) -> bool:
        """Whether every epoch leaves out the same rows."""
        return self.remainder == "drop" and self.order in get_args(FixedName)

    def _kept_rows(self) -> np.ndarray:
        """Those of an epoch that drops the same ones as every other."""
        buckets = range(len(self.plan))
        own = [self._rows.own(k)[: int(self.flow.rows[k])] for k in buckets]
        return np.concatenate(own)

    def traits(self) -> dict[str, Any]:
        groups = {"accumulate": self.accumulate, "group": self.group}
        return {
            "seed": self.seed,
            "order": str(self.order),
            "remainder": self.remainder,
            "opening": self.opening_pairs,
            **(groups if self.accumulate > 1 else {}),
            **({"packing": self.packing.fingerprint} if self.packing else {}),
        }

    def _named(self) -> list[str]:
        parts = [str(self.seed), str(self.order)]
        # What is as it always was leaves no trace: old runs have these fingerprints.
        if self.remainder != "cheapest":
            parts += ["remainder", self.remainder]
        if self.opening_pairs:
            parts += ["opening", json.dumps(self.opening_pairs)]
        if self.accumulate > 1:
            parts += ["accumulate", str(self.accumulate), self.group]
        if self.packing is not None:
            parts += ["packing", self.packing.fingerprint]
        return parts


def _check_order(order: Any, size: int) -> None:
    if isinstance(order, Curriculum):
        order.check_size(size)
    elif isinstance(order, str):
        check_choice("order", order, ORDERS)
    else:
        raise ValueError(
            f"`order` is a {type(order).__name__}: choose one of {', '.join(ORDERS)}, "
            "or give a `Curriculum` of difficulties."
        )


def _packed_parts(
    lengths: Mapping[str, ArrayLike], packing: Packing | None
) -> dict[str, np.ndarray]:
    if packing is None:
        raise ValueError(
            f"`lengths` are those of several sequences, {sorted(lengths)}, which are "
            "bucketed where they are packed: give the `packing` that `pack(lengths, "
            "max_seq_len)` made."
        )
    return check_parts(lengths)


def _check_packing(packing: Any, plan: BucketPlan, order: Order) -> None:
    if not isinstance(packing, Packing):
        raise ValueError(
            f"`packing` is a {type(packing).__name__}: make it by `pack(lengths, "
            "max_seq_len)`."
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
    if isinstance(order, Curriculum):
        raise ValueError(
            "`order` is a `Curriculum`, which ranks examples, and `packing` puts easy "
            "ones and hard ones into one row. Leave out either."
        )


def _within(order: Order) -> Any:
    """How the examples of a bucket are sorted."""
    if isinstance(order, Curriculum):
        return order.difficulty if order.replacement else "source"
    return "source" if order == "shuffled" else order
