"""The batches of an epoch: how many each bucket has, and the examples of their rows.

Batches are numbered over all buckets, starting with those of the first bucket. The
numbers of rows and batches follow from the number of examples in each bucket, so they
are the same in every epoch; the example in a row may differ.
"""

from __future__ import annotations

import functools
import itertools
import pathlib
from typing import Any, Literal, TypeAlias

import numpy as np

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.length_counts import chunks
from jaxbucket.base.permutation import fold, permute
from jaxbucket.base.policies import Group
from jaxbucket.base.shared_array import shared_array
from jaxbucket.base.sizes import Counted, total_lengths
from jaxbucket.plan.flow.remainder import Remainder, epoch_flow
from jaxbucket.plan.reports.epoch import Report, report
from jaxbucket.plan.tally import Tally
from jaxbucket.schedule.base import assign_subset
from jaxbucket.schedule.pacing import Unit
from jaxbucket.schedule.packed_rows import PackedRows

Within: TypeAlias = Literal["source", "ascending", "descending"]


class EpochBatches:
    """Numbers the batches of an epoch.

    Args:
      plan: the buckets.
      counts: `[K]` integers, the number of examples that the plan assigns to each
        bucket.
      remainder: the policy for examples that do not fill a batch.
      accumulate: the number of micro-batches in a step.
      group: whether these share a bucket, and are one batch here.

    Attributes:
      plan: the buckets.
      sizes: `[K]` int64, the rows of a full batch of each bucket.
      flow: the number of rows and batches of each bucket.
      num_batches: the number of batches in one epoch.
      batches_per_step: the number of batches in a step.
      steps_per_epoch: the number of steps in one epoch.

    Raises:
      ValueError: if no batch is left.
    """

    def __init__(
        self,
        plan: BucketPlan,
        counts: np.ndarray,
        *,
        remainder: Remainder = "cheapest",
        accumulate: int = 1,
        group: Group = "same",
    ):
        # A step is either one tall batch of a single bucket or several batches.
        together = accumulate if group == "same" else 1
        self.plan = plan
        self.sizes = plan.batch_sizes * together
        self.flow = epoch_flow(plan, counts, self.sizes, plan.costs, remainder)
        self.num_batches = self.flow.num_batches
        self.batches_per_step = accumulate // together
        self.steps_per_epoch = -(-self.num_batches // self.batches_per_step)
        self._report = functools.partial(
            report, plan, remainder=remainder, accumulate=accumulate, group=group
        )
        self._first_batch = np.cumsum(self.flow.batches) - self.flow.batches
        if not self.num_batches:
            raise ValueError(
                f"`overlong={plan.overlong!r}` and `remainder={remainder!r}` leave out "
                "every example. Raise `max_seq_len`, or lower `max_tokens`."
            )

    def report(self, lengths: Counted) -> Report:
        """Returns the exact numbers of an epoch of examples with these lengths."""
        return self._report(lengths)

    def positions(self, step: int) -> range:
        """Returns the positions of the batches of a step of the epoch."""
        first = step * self.batches_per_step
        return range(first, first + self.batches_per_step)

    def bucket_of(self, batch: int | np.ndarray) -> np.ndarray:
        """Returns the index of the bucket of each batch."""
        return np.searchsorted(self._first_batch, batch, side="right") - 1

    def batch_rows(self, batch: int) -> tuple[int, range]:
        """Returns the bucket of a batch, and the numbers of its non-empty rows.

        Rows are numbered within a bucket, through all of its batches.
        """
        bucket = int(self.bucket_of(batch))
        first = (batch - int(self._first_batch[bucket])) * int(self.sizes[bucket])
        last = min(first + int(self.sizes[bucket]), int(self.flow.rows[bucket]))
        return bucket, range(first, last)


class EpochRows(EpochBatches):
    """The batches of an epoch, and the examples in their rows.

    A bucket has a slot for each of its own examples, followed by a slot for each row
    that other buckets promote to it. Each row takes one slot, either in order or by a
    permutation. Rows before `flow.rows[k]` are in batches of bucket k; later ones are
    promoted, or dropped.

    Args:
      plan: the buckets.
      lengths: `[N]` integers that the plan accepts, or `[N, Q]`.
      within: how the examples of a bucket are sorted.
      packed: the examples of packed rows; None if a row is an example.
      subset: `[N]` bool, the examples of an epoch; None for all.
      stored: the file of a copy of the examples by bucket that the processes of a host
        share; None if this process has its own.
      options: `remainder`, `accumulate` and `group`, as for `EpochBatches`.
    """

    def __init__(
        self,
        plan: BucketPlan,
        lengths: np.ndarray,
        *,
        within: Within = "source",
        packed: PackedRows | None = None,
        subset: np.ndarray | None = None,
        stored: pathlib.Path | None = None,
        **options: Any,
    ):
        self._packed = packed
        self._lengths = lengths if subset is None else lengths[subset]
        self._num_examples = len(lengths)
        counts = Tally.of(plan, self._lengths).examples
        super().__init__(plan, counts, **options)
        self._examples = shared_array(
            stored,
            int(counts.sum()),
            np.uint32 if len(lengths) <= 2**32 else np.int64,
            lambda out: sort_by_bucket(out, plan, lengths, counts, within, subset),
        )
        self._offsets = np.cumsum(counts) - counts
        self._promoted = self.flow.promoted.tolist()

    @functools.cached_property
    def tokens_per_epoch(self) -> int:
        """The number of real tokens in an epoch, the mean if epochs differ."""
        return self.report(self._lengths).real_tokens

    def progress(self, unit: Unit, epoch: int, position: int) -> float:
        """Returns the progress of training before a batch.

        Args:
          unit: "epochs"; "steps", an integer for the step of the batch; or "tokens",
            the real tokens in these steps if every step had the mean number.
          epoch, position: the epoch, and the position of the batch in it.
        """
        if unit == "epochs":
            return epoch + position / self.num_batches
        step = epoch * self.steps_per_epoch + position // self.batches_per_step
        if unit == "steps":
            return step
        return step * self.tokens_per_epoch / self.steps_per_epoch

    def largest(self, values: np.ndarray, epoch: int) -> np.ndarray:
        """Returns the largest value of the examples of each row in an epoch, `[R]`.

        These are `values`, a number for each example, unless rows are packed.
        """
        return values if self._packed is None else self._packed.largest(values, epoch)

    def is_kept(self) -> np.ndarray | None:
        """Returns whether each example takes part, `[N]` bool; None if all do."""
        if self._packed is not None:
            return self._packed.is_kept
        if len(self._examples) == self._num_examples:
            return None
        is_kept = np.zeros(self._num_examples, bool)
        is_kept[self._examples] = True
        return is_kept

    def bucket_examples(self, bucket: int) -> np.ndarray:
        """Returns the sorted examples that the plan assigns to a bucket."""
        first = int(self._offsets[bucket])
        return self._examples[first : first + int(self.flow.counts[bucket])]

    def examples(
        self, bucket: int, row: np.ndarray, seed: int | None = None, epoch: int = 0
    ) -> np.ndarray:
        """Returns the `[n]` int64 examples in the `[n]` rows of a bucket.

        Rows take slots in order; or, with a seed, by the permutations of an epoch.
        """
        examples = np.empty(len(row), np.int64)
        remaining = [(bucket, np.arange(len(row)), row)]
        while remaining:
            k, places, rows = remaining.pop()
            own = int(self.flow.counts[k])
            slot = rows
            if seed is not None:
                size = own + int(self.flow.carried[k])
                slot = permute(rows, size, fold(seed, epoch, k))
            is_own = slot < own
            examples[places[is_own]] = self._examples[self._offsets[k] + slot[is_own]]
            # The rows that other buckets promote follow, bucket by bucket.
            start = own
            for source in np.flatnonzero(self.flow.targets == k).tolist():
                end = start + self._promoted[source]
                is_there = (start <= slot) & (slot < end)
                if is_there.any():
                    promoted = slot[is_there] - start + int(self.flow.rows[source])
                    remaining.append((source, places[is_there], promoted))
                start = end
        return examples


def sort_by_bucket(
    out: np.ndarray,
    plan: BucketPlan,
    lengths: np.ndarray,
    counts: np.ndarray,
    within: Within = "source",
    subset: np.ndarray | None = None,
) -> None:
    """Writes all examples that the plan keeps, sorted by bucket.

    Example:
      >>> from jaxbucket import Bucket
      >>> plan = BucketPlan((Bucket(4, 8), Bucket(2, 16)), max_tokens=32)
      >>> lengths, examples = np.array([9, 8, 16, 3, 5]), np.empty(5, np.uint32)
      >>> counts = Tally.of(plan, lengths).examples
      >>> sort_by_bucket(examples, plan, lengths, counts, "descending")
      >>> examples
      array([1, 4, 3, 2, 0], dtype=uint32)

    Args:
      out: `[N']` integers, where to write the examples.
      plan: the buckets.
      lengths: `[N]` integers that the plan accepts, or `[N, Q]` with a column for each
        of several sequences.
      counts: `[K]` integers, the number of examples of each bucket, whose sum is N'.
      within: how the examples of a bucket are sorted: in "source" order, or
        "ascending" or "descending" by (total) length. Ties stay in source order.
      subset: `[N]` bool, the examples to write; None for all. The plan has to accept
        only these.
    """
    ends = np.cumsum(counts)
    places = ends - counts
    start = 0
    for part in chunks(lengths):
        used = None if subset is None else subset[start : start + len(part)]
        index = assign_subset(plan, part, used)
        # numpy uses a radix sort, which is linear, for 16-bit integers.
        order = np.argsort(index, kind="stable")
        edges = np.searchsorted(index[order], np.arange(len(plan) + 1)).tolist()
        for bucket, (first, last) in enumerate(itertools.pairwise(edges)):
            place = places[bucket]
            out[place : place + last - first] = start + order[first:last]
        places += np.diff(edges)
        start += len(part)
    if within == "source":
        return
    sign, totals = -1 if within == "descending" else 1, total_lengths(lengths)
    for part in np.split(out, ends[:-1]):
        key = sign * totals[part].astype(np.int64)
        part[:] = part[np.argsort(key, kind="stable")]
