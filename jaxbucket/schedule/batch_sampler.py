"""The examples of every batch as lists of indices, for PyTorch's `DataLoader`."""

from __future__ import annotations

from collections.abc import Iterator

from jaxbucket.base.batch import EMPTY_ROW
from jaxbucket.base.bucket import Bucket
from jaxbucket.base.checks import check_integer
from jaxbucket.base.row_shard import RowShard, checked_shard
from jaxbucket.schedule.base import Schedule


class BatchSampler:
    """Yields the indices of the examples of each batch, for `batch_sampler=`.

    The examples of a batch have similar lengths and belong into one bucket. Pad them to
    its shape in `collate_fn`, or train in PyTorch. If you need padded batches of numpy
    arrays, `batch_dataset` has all of them by step, and
    `DataLoader(dataset, batch_size=None, collate_fn=lambda batch: batch)` loads them.

    All processes have the same number of batches. A process gets an empty list for a
    batch that has no example for it, so `collate_fn` must accept an empty list, and
    return a batch without real tokens. PyTorch's own `collate_fn` raises an error.

    Example:
      >>> import jaxbucket as jb
      >>> plan = jb.BucketPlan.from_shapes([(2, 4), (1, 8)])
      >>> schedule = jb.BatchSchedule(plan, [3, 7, 1, 2], order="ascending")
      >>> list(BatchSampler(schedule))
      [[2, 3], [0], [1]]

    Args:
      schedule: assigns examples to the rows of a bucket for each step.
      shard: the rows of this process, from `local_rows(mesh)`; all rows by default.
      epoch: the epoch of the schedule.

    Attributes:
      epoch: the epoch of the next iteration. Set it before each of them, as for
        `torch.utils.data.DistributedSampler.set_epoch`.

    Raises:
      ValueError: if `epoch` is negative, the parts of `shard` do not divide a bucket's
        B, or `schedule` is a mixture with names, whose examples come from several
        sources.
    """

    def __init__(
        self, schedule: Schedule, shard: RowShard | None = None, epoch: int = 0
    ):
        if schedule.names:
            raise ValueError(
                f"`schedule` is a mixture of the sources {list(schedule.names)}. Pass "
                "a `Mixture` of a list of schedules, with `jb.data.concatenate` of the "
                "sources, or use `batch_dataset`."
            )
        self._schedule = schedule
        self._shard = checked_shard(shard)
        for bucket in schedule.buckets:
            self._shard.cut(bucket)
        self.set_epoch(epoch)

    def __len__(self) -> int:
        """The number of batches in an epoch; those of a step count individually."""
        start, end = self._steps()
        return (end - start) * len(self._schedule.micro_batches(start))

    def __iter__(self) -> Iterator[list[int]]:
        return (indices for indices, _ in self._batches())

    def buckets(self) -> Iterator[Bucket]:
        """Returns the bucket of each batch, in the order of the indices."""
        return (bucket for _, bucket in self._batches())

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration."""
        self.epoch = check_integer("epoch", epoch, least=0)

    def _steps(self) -> tuple[int, int]:
        """Returns the first step of the epoch, and that of the next one."""
        first = self._schedule.epoch_start(self.epoch)
        return first, self._schedule.epoch_start(self.epoch + 1)

    def _batches(self) -> Iterator[tuple[list[int], Bucket]]:
        for step in range(*self._steps()):
            for batch in self._schedule.micro_batches(step):
                shard = self._shard.of(batch.bucket)
                rows = batch.rows[shard.rows(batch.bucket.batch_size)]
                yield rows[rows != EMPTY_ROW].tolist(), batch.bucket
