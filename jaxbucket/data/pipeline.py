"""From a source of examples to a `grain.MapDataset` of batches."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from typing import Any, overload

import grain
import numpy as np

from jaxbucket.base.batch import RowShard
from jaxbucket.base.checks import check_integer
from jaxbucket.base.digest import digest
from jaxbucket.base.padding import PadValue, check_pad_value
from jaxbucket.base.position import DataPosition, check_position
from jaxbucket.data.batch_reader import BatchReader, padded_features
from jaxbucket.data.example import Sequences, copied, listed_names
from jaxbucket.data.num_steps import RunEnd, check_steps, epoch_end, run_end
from jaxbucket.data.source import Source
from jaxbucket.data.transform import Transform, check_transform, transform_name
from jaxbucket.schedule.base import Schedule


def batch_dataset(
    source: Source,
    schedule: Schedule,
    *,
    shard: RowShard | None = None,
    start_step: int | None = None,
    num_steps: float | None = None,
    num_epochs: int | None = None,
    sequences: Sequences = None,
    pad_value: PadValue = 0,
    transform: Transform | None = None,
) -> BatchDataset:
    """Returns the schedule's batches as a `grain.MapDataset`, numpy arrays.

    Element 0 is the batch of `start_step`, so that resuming takes one integer; where
    the schedule accumulates, it is a tuple of batches. Only the examples in the rows of
    `shard` are read.

    Example:
      >>> from jaxbucket import BatchSchedule, measure_lengths, plan_buckets
      >>> source = [{"tokens": [7] * n} for n in (3, 1, 4, 2)]
      >>> lengths = measure_lengths(source, progress=False)
      >>> plan = plan_buckets(lengths, max_tokens=8, num_buckets=2)
      >>> dataset = batch_dataset(source, BatchSchedule(plan, lengths))
      >>> sorted(batch.bucket for batch in dataset)
      [Bucket(batch_size=2, seq_len=3), Bucket(batch_size=2, seq_len=4)]

    Args:
      source: examples by index, the ones that were measured.
      schedule: which examples fill which bucket at which step.
      shard: the rows this process loads, from `local_rows(mesh)`; by default all.
      start_step: the first step to give; by default the schedule's first.
      num_steps: where the run ends, counted from step 0 and over epochs; `math.inf`
        for a run without end. By default the end of the epoch that `start_step` is in.
      num_epochs: the same in epochs of the schedule, instead.
      sequences: the features that are padded, by default those of the source, if it
        has its own as a token file has, or else all with a leading axis. Of several
        sequences with lengths of their own, name -> the features that are as long as
        this sequence; by default none but itself.
      pad_value: what fills them after their end: name -> number, 0 for those without
        one. A number alone is of the only one there is.
      transform: `(example, rng) -> example`, random augmentation. It gets a copy of
        the example, arrays, bytes as `[]` of objects: `example["audio"].item()`. And a
        `np.random.Generator` that depends on the schedule's seed and first step, the
        epoch and the index of the example alone; where an epoch may have an example
        several times, on its place, too. Other generators are seeded by what it draws,
        `rng.integers(2**63)`, or spawned by it. The length has to stay.

    Raises:
      ValueError: if the source has not one example for each length, the shard's parts
        do not divide a bucket, or the steps are negative or in the wrong order. And
        from an element, if an example is not as long as it was measured, or `transform`
        raises, does not return a dict, or changes the length.
    """
    for method in ("__len__", "__getitem__"):
        if not hasattr(source, method):
            raise ValueError(
                f"`source` is a {type(source).__name__}, without `{method}`: give "
                "examples by index, such as a list. Of a stream `stream_batches` "
                "makes batches."
            )
    if not isinstance(schedule, Schedule):
        raise ValueError(
            f"`schedule` is a {type(schedule).__name__}: make one by "
            "`BatchSchedule(plan, lengths)`."
        )
    if not isinstance(shard, RowShard | None):
        raise ValueError(
            f"`shard` is a {type(shard).__name__}: give "
            "`jb.sharding.local_rows(mesh)`, or a `jb.data.RowShard`."
        )
    reader = BatchReader(
        source,
        schedule,
        shard or RowShard(),
        padded_features(source, schedule, sequences),
        check_pad_value(pad_value),
        check_transform(transform),
    )
    return BatchDataset(reader, start_step, run_end(num_steps, num_epochs))


class BatchDataset(grain.MapDataset[Any]):
    """What `batch_dataset` returns; elements beyond its length are later steps."""

    def __init__(
        self, reader: BatchReader, start_step: int | None, end: RunEnd | None = None
    ):
        super().__init__()
        if start_step is None:
            start_step = reader.schedule.first_step
        self._reader = reader
        self._start_step = check_integer("start_step", start_step)
        self._ends_by_itself = end is None
        self._end = end or epoch_end(reader.schedule, self._start_step)
        self._num_steps = check_steps(reader.schedule, self._start_step, self._end)

    @property
    def schedule(self) -> Schedule:
        """Which examples are in which rows at which step."""
        return self._reader.schedule

    @property
    def shard(self) -> RowShard:
        """The rows of every global batch that are loaded."""
        return self._reader.shard

    @property
    def sequences(self) -> Sequences:
        """The features that are padded: those asked for, or the source's own."""
        return self._reader.sequences

    @property
    def start_step(self) -> int:
        """The step that element 0 is of."""
        return self._start_step

    @property
    def example(self) -> dict[str, np.ndarray]:
        """`source[0]` as batches have it, transformed: for `batch_specs`."""
        return copied(self._reader.like)

    def __len__(self) -> int:
        return self._num_steps - self._start_step

    @overload
    def __getitem__(self, index: slice) -> grain.MapDataset[Any]: ...

    @overload
    def __getitem__(self, index: int) -> Any: ...

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self.slice(index)
        if index < 0:
            raise IndexError(f"`index={index}` must not be negative.")
        step = self._start_step + index
        if step > sys.maxsize:
            raise IndexError(
                f"`index={index}` is of step {step}, beyond {sys.maxsize}."
            )
        return self._reader.read(step)

    def position(self, step: int) -> DataPosition:
        """Returns what to save beside a state that has done `step` updates.

        Args:
          step: the updates that are done, and so the step to go on with.

        Returns:
          The step, and what names the plan, the data and the schedule: `resume`
          compares them. Of a transform it has the name, not what it does.
        """
        return _position(self._reader, step)

    def resume(self, position: DataPosition) -> BatchDataset:
        """Returns the batches that follow a position, bit for bit those of its run.

        Example:
          >>> from jaxbucket import BatchSchedule, plan_buckets
          >>> source = [{"tokens": [7] * n} for n in (3, 1, 4, 2)]
          >>> plan = plan_buckets([3, 1, 4, 2], max_tokens=4, num_buckets=1)
          >>> dataset = batch_dataset(source, BatchSchedule(plan, [3, 1, 4, 2]))
          >>> rest = dataset.resume(dataset.position(3))
          >>> len(dataset), len(rest), rest.start_step
          (4, 1, 3)

        Args:
          position: what `position` gave in the run that goes on.

        Raises:
          ValueError: if the plan, the data, the seed, the order, `sequences`,
            `pad_value` or the name of the transform is not what it was; it names what
            has changed. Or if the run ends before the position, or `position` is not a
            `DataPosition`.
        """
        check_position(position)
        reader, end = self._reader, self._end
        schedule = _continued(reader.schedule, position)
        if schedule is not reader.schedule:
            reader = dataclasses.replace(reader, schedule=schedule)
            if self._ends_by_itself:
                # With the epoch that the position is in, or has just been through.
                end = epoch_end(schedule, position.step - 1)
        # Before the end, because that of another run says nothing.
        position.check_same(_position(reader, position.step))
        if position.step > end.step(schedule):
            raise ValueError(
                f"The run ends at step {end.step(schedule)}, before the position's "
                f"step {position.step}. Raise `num_steps` or `num_epochs`."
            )
        return BatchDataset(reader, position.step, end)


def _continued(schedule: Schedule, position: DataPosition) -> Schedule:
    """The schedule, with what the run of the position has deliberately gone on with.

    That is not a change any more.
    """
    continues = position.schedule.get("continues")
    if schedule.continues is not None or continues is None:
        return schedule
    first_step = position.schedule.get("first_step")
    if (
        not isinstance(first_step, int)
        or not 0 <= first_step <= position.step
        or not isinstance(continues, str)
    ):
        raise ValueError(
            f"`position` is damaged: it continues {continues!r} from step "
            f"{first_step!r} on, and is at step {position.step}. Restore an "
            "earlier checkpoint."
        )
    return schedule.beginning_at(first_step, continues)


def _position(reader: BatchReader, step: int) -> DataPosition:
    schedule, plan = reader.schedule, json.loads(reader.schedule.plan.to_json())
    padding = {"sequences": _names(reader.sequences), "pad_value": reader.pad_value}
    transform = {}
    if reader.transform is not None:
        transform = {"transform": transform_name(reader.transform)}
    fingerprint = digest(schedule.data_fingerprint.encode(), reader.contents.encode())
    return DataPosition(
        step,
        {
            **{name: plan[name] for name in plan if name not in ("format", "version")},
            "fingerprint": schedule.plan.fingerprint,
        },
        {
            "examples": len(schedule.lengths),
            "tokens": int(schedule.lengths.sum(dtype=np.int64)),
            "fingerprint": fingerprint,
        },
        {
            **schedule.config(),
            "first_step": schedule.first_step,
            "continues": schedule.continues,
            **padding,
            **transform,
            "fingerprint": schedule.fingerprint,
        },
    )


def _names(sequences: Sequences) -> Any:
    """The names of sequences as lists, which JSON has."""
    if sequences is None:
        return None
    if isinstance(sequences, Mapping):
        return {name: listed_names(x) for name, x in sequences.items()}
    return listed_names(sequences)
