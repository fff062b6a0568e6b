"""The batches of a schedule as datasets of Grain, read from a source."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast, overload

import grain
import numpy as np

from jaxbucket.base.batch import Batch
from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.checks import check_integer, check_positive, check_type
from jaxbucket.base.digest import digest
from jaxbucket.base.padding import PadValue
from jaxbucket.base.position import DataPosition
from jaxbucket.base.row_shard import RowShard, checked_shard
from jaxbucket.data.example import Sequences, Transform, copy_features
from jaxbucket.data.reader import BatchReader, FeatureTemplate, MixtureReader
from jaxbucket.data.source import Source
from jaxbucket.schedule.base import Schedule
from jaxbucket.schedule.mixture import Mixture

Reader: TypeAlias = BatchReader | MixtureReader


def batch_dataset(
    source: Source | Mapping[str, Source],
    schedule: Schedule,
    *,
    shard: RowShard | None = None,
    start_step: int = 0,
    num_steps: float | None = None,
    num_epochs: int | None = None,
    sequences: Sequences = None,
    pad_value: PadValue = 0,
    transform: Transform | None = None,
) -> BatchDataset:
    """Returns the schedule's batches as a `grain.MapDataset` of numpy batches.

    Element 0 is the batch of `start_step`, so a single integer is enough to resume. If
    the schedule accumulates gradients, each element is a tuple of micro-batches. Only
    the examples in the rows of `shard` are read.

    Example:
      >>> from jaxbucket import BatchSchedule, measure_lengths, plan_buckets
      >>> source = [{"tokens": [7] * n} for n in (3, 1, 4, 2)]
      >>> lengths = measure_lengths(source, progress=False)
      >>> plan = plan_buckets(lengths, max_tokens=8, num_buckets=2)
      >>> dataset = batch_dataset(source, BatchSchedule(plan, lengths))
      >>> sorted(batch.bucket for batch in dataset)
      [Bucket(batch_size=2, seq_len=2), Bucket(batch_size=2, seq_len=4)]

    Args:
      source: random-access source of the examples whose lengths were measured. For a
        `Mixture` with names, a mapping from name to source; then `sequences`,
        `pad_value` and `transform` may be mappings with the same names.
      schedule: determines which examples fill which bucket at each step.
      shard: the rows this process loads, from `local_rows(mesh)`. By default all rows.
      start_step: the step of element 0.
      num_steps: the step at which the run ends, counted from step 0 across epochs;
        `math.inf` for a run without end. By default the run ends with the epoch of
        `start_step`.
      num_epochs: the end of the run in epochs of the schedule, as an alternative to
        `num_steps`.
      sequences: names of the features that are padded. By default those of the source
        if it declares them, as a token file does; else all with a leading axis. If
        examples have several sequences: a mapping, as for `collate_rows`.
      pad_value: as for `collate_rows`.
      transform: random augmentation, `(example, rng) -> example`, which must keep the
        length. `example` is a copy whose values are arrays; a `bytes` value is a 0-d
        object array, read with `example["audio"].item()`. `rng` is a
        `np.random.Generator` determined by the schedule's seed, the step at
        which it starts, the epoch and the example's index; if an epoch may contain an
        example several times, also by its place in the batch. Seed other random
        generators from it, for example with `rng.integers(2**63)` or `rng.spawn`.

    Returns:
      The dataset. Its length is the number of steps from `start_step` to the end.

    Raises:
      ValueError: if the numbers of examples and lengths differ, if the shard's parts do
        not divide a bucket, or if the steps are negative or in the wrong order. Reading
        an element raises if the length of an example has changed, or if `transform`
        raises, does not return a dict, or changes the length.
    """
    check_type("schedule", schedule, Schedule, "Pass `BatchSchedule(plan, lengths)`.")
    shard, start_step = checked_shard(shard), check_integer("start_step", start_step)
    end = _end_step(schedule, start_step, num_steps, num_epochs)
    options: Any = {
        "sequences": sequences,
        "pad_value": pad_value,
        "transform": transform,
    }
    has_names = bool(schedule.names)
    if has_names != isinstance(source, Mapping):
        raise ValueError(
            f"`source` is a {type(source).__name__}. A `Mixture` with names takes a "
            "mapping from them to sources, any other schedule one source."
        )
    if has_names:
        named = cast(Mapping[str, Source], source)
        reader = MixtureReader(named, cast(Mixture, schedule), shard, **options)
    else:
        reader = BatchReader(cast(Source, source), schedule, shard, **options)
    return BatchDataset(reader, start_step, end)


def _end_step(
    schedule: Schedule,
    start_step: int,
    num_steps: float | None,
    num_epochs: int | None,
) -> int:
    """Returns the first step after a run; arguments as for `batch_dataset`."""
    if num_steps is not None and num_epochs is not None:
        raise ValueError(
            f"`num_steps={num_steps}` and `num_epochs={num_epochs}` both set the "
            "end of the run. Pass only one of them."
        )
    if num_epochs is not None:
        end = schedule.epoch_start(check_positive("num_epochs", num_epochs))
    elif num_steps is None:
        end = schedule.epoch_start(schedule.epoch_at(max(start_step, 0)) + 1)
    elif num_steps == math.inf:
        # A Python sequence cannot have more elements.
        end = sys.maxsize
    else:
        end = check_integer("num_steps", num_steps)
    if not 0 <= start_step <= end:
        raise ValueError(
            f"`start_step={start_step}` must be between 0 and the end of the run, "
            f"`num_steps={end}`."
        )
    return end


class BatchDataset(grain.MapDataset[Batch]):
    """The dataset that `batch_dataset` returns.

    Indices beyond its length are valid and return the batches of later steps.
    """

    def __init__(self, reader: Reader, start_step: int, end: int):
        super().__init__()
        self._reader = reader
        self._start_step, self._end = start_step, end

    @property
    def schedule(self) -> Schedule:
        """The schedule that assigns examples to rows at each step."""
        return self._reader.schedule

    @property
    def start_step(self) -> int:
        """The step of element 0."""
        return self._start_step

    @property
    def example(self) -> dict[str, Any]:
        """`source[0]` after `transform`, as arrays: an argument for `batch_specs`.

        For a mixture with names, name -> such an example of a component.
        """
        if isinstance(self._reader, MixtureReader):
            return {x.component: copy_features(x.example) for x in self.templates}
        return copy_features(self._reader.like)

    @property
    def templates(self) -> list[FeatureTemplate]:
        """The features of the batches, or of those of each component of a mixture."""
        return self._reader.templates

    def __len__(self) -> int:
        return self._end - self._start_step

    @overload
    def __getitem__(self, index: slice) -> grain.MapDataset[Batch]: ...

    @overload
    def __getitem__(self, index: int) -> Batch: ...

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self.slice(index)
        if index < 0:
            raise IndexError(f"`index={index}` must not be negative.")
        return self._reader.read(self._start_step + index)

    def to_iter_dataset(self, *args: Any, **options: Any) -> BatchIterDataset:
        """Returns the batches as a `grain.IterDataset`, read in threads.

        Its states also hold the position of `start_step`, so that iterators of another
        plan, schedule or dataset refuse them. Those of `batches.map(...)` do not, so
        transform batches after this call. The arguments are those of Grain.
        """
        batches = super().to_iter_dataset(*args, **options)
        first = (self._reader, self._start_step, self._reader.schedule)
        return BatchIterDataset(batches, functools.partial(_position, *first))

    def position(self, step: int) -> DataPosition:
        """Returns the position to save alongside a state that has done `step` updates.

        Args:
          step: the number of completed updates, which is also the next step.

        Returns:
          The step and the fingerprints of the plan, the data and the schedule, which
          `resume` compares. Those of a `JoinedSchedule` are of the schedules that have
          begun. A transform is identified by its name only, not by its code.
        """
        return _position(self._reader, step, self._reader.schedule.before(step))

    def resume(self, position: DataPosition) -> BatchDataset:
        """Returns the rest of a run, bit for bit the same, from a saved position.

        To change the schedule at this or a later step, resume with a `JoinedSchedule`
        of the old one and the new one.

        Example:
          >>> from jaxbucket import BatchSchedule, plan_buckets
          >>> source = [{"tokens": [7] * n} for n in (3, 1, 4, 2)]
          >>> plan = plan_buckets([3, 1, 4, 2], max_tokens=4, num_buckets=1)
          >>> dataset = batch_dataset(source, BatchSchedule(plan, [3, 1, 4, 2]))
          >>> rest = dataset.resume(dataset.position(3))
          >>> len(dataset), len(rest), rest.start_step
          (4, 1, 3)

        Args:
          position: the result of `position` in the run to resume.

        Returns:
          A dataset that starts at the position's step.

        Raises:
          ValueError: if the plan, the data, the seed, the order, `sequences`,
            `pad_value` or the name of the transform differs, naming each change; if the
            run ends before the position; or if `position` is not a `DataPosition`.
        """
        remedy = "Pass that of `Checkpoints.restore` or `MeshLoader.position`."
        check_type("position", position, DataPosition, remedy)
        # Compared first: the end of a different run would be a misleading error.
        position.check_same(self.position(position.step))
        if position.step > self._end:
            raise ValueError(
                f"The run ends at step {self._end}, before the position's step "
                f"{position.step}. Increase `num_steps` or `num_epochs`."
            )
        return BatchDataset(self._reader, position.step, self._end)


class BatchIterDataset(grain.IterDataset[Any]):
    """The dataset that `BatchDataset.to_iter_dataset` returns, whose states name a run.

    Grain's own state is the index of the next batch, which any other run would accept.
    """

    def __init__(self, batches: Any, first: Callable[[], DataPosition]):
        super().__init__(batches)
        self._first = first

    def __iter__(self) -> BatchIterator:
        (batches,) = self.parents
        return BatchIterator(iter(batches), self._first)


class BatchIterator(grain.DatasetIterator[Any]):
    """Adds the position of the first batch to the states of Grain's iterator.

    A restored state is checked when the next batch is read, as by Grain's workers,
    because the position is computed from a few examples.
    """

    def __init__(self, batches: Any, first: Callable[[], DataPosition]):
        super().__init__(batches)
        self._batches = batches
        self._first = functools.cache(first)
        self._restored: dict[str, Any] | None = None

    def get_state(self) -> dict[str, Any]:
        if self._restored is not None:
            return self._restored
        return self._batches.get_state() | {"position": self._first().to_dict()}

    def set_state(self, state: dict[str, Any]) -> None:
        self._restored = state

    def __next__(self) -> Any:
        if self._restored is not None:
            state = dict(self._restored)
            self._check(state.pop("position", None), state.get("next_index", 0))
            self._batches.set_state(state)
            self._restored = None
        return next(self._batches)

    def _check(self, position: Any, index: int) -> None:
        """Raises a ValueError unless a state is that of the same run."""
        saved, first = DataPosition.from_dict(position), self._first()
        dataclasses.replace(saved, step=saved.step + index).check_same(first)
        if saved.step != first.step:
            raise ValueError(
                f"`start_step={first.step}` differs from the {saved.step} of the "
                f"state, which counts from it. Pass {saved.step}."
            )


def _position(reader: Reader, step: int, schedule: Schedule) -> DataPosition:
    """Returns the position of a schedule that is all of the reader's or a part."""
    fingerprint = digest(schedule.data_fingerprint.encode(), reader.contents.encode())
    return DataPosition(
        step,
        _describe_plans(schedule.plans),
        {
            "examples": len(schedule.lengths),
            "tokens": int(schedule.lengths.sum(dtype=np.int64)),
            "fingerprint": fingerprint,
        },
        {
            **schedule.config(),
            **reader.describe(),
            "fingerprint": schedule.fingerprint,
            "later": reader.schedule.fingerprint,
        },
    )


def _describe_plans(plans: Sequence[BucketPlan]) -> dict[str, Any]:
    """Returns the options of one plan, or of several by their index."""
    options = [json.loads(plan.to_json()) for plan in plans]
    for plan in options:
        del plan["format"], plan["version"]
    if len(plans) == 1:
        return {**options[0], "fingerprint": plans[0].fingerprint}
    fingerprint = digest(*(plan.fingerprint.encode() for plan in plans))
    return {**{str(i): x for i, x in enumerate(options)}, "fingerprint": fingerprint}
