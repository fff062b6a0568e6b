"""The shapes and numbers of examples of all steps, without the examples."""

from __future__ import annotations

from jaxbucket.base.bucket import Bucket
from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.checks import check_accumulate, check_choice, check_seed
from jaxbucket.base.policies import GROUPS, Group
from jaxbucket.base.sizes import Counted
from jaxbucket.plan.flow.remainder import Remainder
from jaxbucket.plan.reports.epoch import Report
from jaxbucket.plan.tally import Tally
from jaxbucket.schedule.base import check_step
from jaxbucket.schedule.epoch_rows import EpochBatches
from jaxbucket.schedule.orders import NAMED, Drawn, Order, OrderName


class BatchCounts:
    """What a `BatchSchedule` knows without its examples: their numbers by step.

    They follow from how many examples have each length, so a trillion examples cost
    what a thousand do. The buckets and numbers of every step are those of a
    `BatchSchedule` with the same options.

    Example:
      >>> import jaxbucket as jb
      >>> counts = jb.LengthCounts({16: 6 * 10**12, 64: 10**12})
      >>> plan = jb.plan_buckets(counts, max_tokens=64, num_buckets=2)
      >>> steps = BatchCounts(plan, counts)
      >>> steps.steps_per_epoch, steps.micro_batches(10**12)
      (2500000000000, ((Bucket(batch_size=4, seq_len=16), 4),))

    Args:
      plan: the buckets.
      lengths: `LengthCounts`, or lengths as for `report`.
      seed: an integer from 0 to 2**63 - 1.
      order: "spread", "shuffled" or `GroupedByLength()`. In other orders, the buckets
        of the steps depend on the examples.
      remainder: as for `BatchSchedule`, and the following.
      accumulate: the number of micro-batches in a step.
      group: whether the micro-batches of a step have one shape.

    Attributes:
      plan: as above.
      batches: the batches of an epoch.
      tally: the examples of each bucket, and their tokens.
      report: the exact numbers of one epoch.

    Raises:
      ValueError: if the plan refuses the lengths, no example is left, or an option is
        unknown or out of range.
    """

    def __init__(
        self,
        plan: BucketPlan,
        lengths: Counted,
        *,
        seed: int = 0,
        order: OrderName | Order = "spread",
        remainder: Remainder = "cheapest",
        accumulate: int = 1,
        group: Group = "same",
    ):
        check_choice("group", group, GROUPS)
        accumulate = check_accumulate(accumulate)
        known = NAMED.get(order) if isinstance(order, str) else order
        if not isinstance(known, Drawn):
            raise ValueError(
                f"`order={order!r}` depends on more than the number of each length. "
                "Pass 'spread', 'shuffled' or `GroupedByLength()`."
            )
        self.plan, self.tally = plan, Tally.of(plan, lengths)
        self.batches = EpochBatches(
            plan,
            self.tally.examples,
            remainder=remainder,
            accumulate=accumulate,
            group=group,
        )
        self._repeats = remainder == "repeat"
        self._epochs = known.epochs(self.batches, check_seed(seed), None)
        self.report: Report = self.batches.report(lengths)

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps in one epoch."""
        return self.batches.steps_per_epoch

    def micro_batches(self, step: int) -> tuple[tuple[Bucket, int], ...]:
        """Returns the bucket and the number of examples of each micro-batch of a step.

        Args:
          step: the step, counted over all epochs.
        """
        epoch, position = divmod(check_step(step), self.steps_per_epoch)
        places = self.batches.positions(position)
        return tuple(part for place in places for part in self._batch(epoch, place))

    def _batch(self, epoch: int, position: int) -> list[tuple[Bucket, int]]:
        batches = self.batches
        if position >= batches.num_batches and not self._repeats:
            return [(self.plan.buckets[self.plan.filler], 0)]
        number = self._epochs.number(epoch, position % batches.num_batches)
        index, rows = batches.batch_rows(number)
        bucket, size = self.plan.buckets[index], int(batches.sizes[index])
        left = size if self._repeats else len(rows)
        starts = range(0, size, bucket.batch_size)
        return [(bucket, min(max(left - x, 0), bucket.batch_size)) for x in starts]
