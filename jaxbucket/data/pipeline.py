"""From a source of examples to a `grain.MapDataset` of batches."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn, overload

import grain
import numpy as np

from jaxbucket.base.batch import EMPTY_ROW, Batch, BatchIndices, RowShard
from jaxbucket.base.buckets import Bucket
from jaxbucket.base.checks import check_integer, check_positive, split_line
from jaxbucket.base.digest import digest
from jaxbucket.base.padding import PadValue, check_pad_value
from jaxbucket.base.position import DataPosition, check_position
from jaxbucket.data.chunk_source import ChunkSource
from jaxbucket.data.collate import collate_rows
from jaxbucket.data.concat_source import ConcatSource
from jaxbucket.data.example import (
    Example,
    Sequences,
    as_arrays,
    copied,
    example_lengths,
    listed_names,
)
from jaxbucket.data.source import (
    PackedSource,
    RowSource,
    Source,
    check_sequences,
    contents,
    read_example,
    refuse_changed,
)
from jaxbucket.data.transform import (
    Transform,
    apply_transform,
    check_transform,
    transform_name,
)
from jaxbucket.schedule.example_draws import BatchDraws
from jaxbucket.schedule.schedule import Schedule


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
        sequences with lengths of their own, as in `collate_rows`.
      pad_value: what fills them behind their end: name -> number, 0 for those without
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
            f"`shard` is a {type(shard).__name__}: give `local_rows(mesh)`, or a "
            "`RowShard`."
        )
    return BatchDataset(
        source,
        schedule,
        shard or RowShard(),
        start_step,
        _run_end(num_steps, num_epochs),
        sequences,
        pad_value,
        check_transform(transform),
    )


class _RunEnd(NamedTuple):
    """Where a run ends: a step, or a number of epochs of whatever schedule it has."""

    num_steps: int | None
    num_epochs: int | None

    def step(self, schedule: Schedule) -> int:
        """The first step that is no part of the run any more."""
        if self.num_epochs is None:
            assert self.num_steps is not None
            return self.num_steps
        return schedule.first_step + self.num_epochs * len(schedule)


def _run_end(num_steps: float | None, num_epochs: int | None) -> _RunEnd | None:
    if num_steps is not None and num_epochs is not None:
        raise ValueError(
            f"`num_steps={num_steps}` and `num_epochs={num_epochs}` both say where "
            "the run ends. Give one of them."
        )
    if num_epochs is not None:
        return _RunEnd(None, check_positive("num_epochs", num_epochs))
    if num_steps is None:
        return None
    # As far as the length of a sequence can be told in Python.
    endless = num_steps == math.inf
    return _RunEnd(
        sys.maxsize if endless else check_integer("num_steps", num_steps), None
    )


class BatchDataset(grain.MapDataset[Any]):
    """What `batch_dataset` returns; elements beyond its length are later steps."""

    def __init__(
        self,
        source: Source,
        schedule: Schedule,
        shard: RowShard,
        start_step: int | None,
        run_end: _RunEnd | None,
        sequences: Sequences,
        pad_value: PadValue,
        transform: Transform | None = None,
    ):
        super().__init__()
        if (
            sequences is None
            and schedule.capacities is None
            and isinstance(source, RowSource | ChunkSource | ConcatSource)
        ):
            # Also where its examples are read one by one.
            sequences = source.sequences
        if len(source) != len(schedule.lengths):
            raise ValueError(_other_size_message(source, schedule))
        gathers = source if isinstance(source, RowSource) else None
        if (
            schedule.capacities is not None
            or isinstance(sequences, Mapping)
            or transform is not None
        ):
            # What gathers rows knows of one length for each example, and has no
            # examples to transform.
            gathers = None
        elif isinstance(source, RowSource):
            check_sequences(source, sequences)
            changed = np.flatnonzero(source.lengths != schedule.lengths)
            if len(changed):
                index = int(changed[0])
                found, measured = source.lengths[index], schedule.lengths[index]
                refuse_changed(index, int(found), int(measured))
        for bucket in schedule.plan.buckets:
            shard.part_size(bucket.batch_size)
        first_step = schedule.first_step
        if start_step is None:
            start_step = first_step
        start_step = check_integer("start_step", start_step)
        self._ends_by_itself = run_end is None
        if run_end is None:
            epochs = (start_step - first_step) // len(schedule) + 1
            run_end = _RunEnd(None, max(epochs, 1))
        num_steps = run_end.step(schedule)
        if num_steps > sys.maxsize:
            raise ValueError(
                f"The run ends at step {num_steps}, beyond {sys.maxsize}. Give "
                "`num_steps=math.inf` for one without end."
            )
        if not first_step <= start_step <= num_steps:
            raise ValueError(
                f"`start_step={start_step}` must be between {first_step} and the end "
                f"of the run, `num_steps={num_steps}`."
            )
        self._source = source
        self._gathers = gathers
        if schedule.max_segments is not None and not isinstance(source, PackedSource):
            # One example after the other is read for a packed row.
            self._gathers = None
        self._schedule = schedule
        self._shard = shard
        self._start_step = start_step
        self._run_end = run_end
        self._num_steps = num_steps
        self._sequences = sequences
        self._pad_value = check_pad_value(pad_value)
        self._transform = transform
        self._first_example: Example | None = None

    @property
    def schedule(self) -> Schedule:
        """Which examples are in which rows at which step."""
        return self._schedule

    @property
    def shard(self) -> RowShard:
        """The rows of every global batch that are loaded."""
        return self._shard

    @property
    def start_step(self) -> int:
        """The step that element 0 is of."""
        return self._start_step

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
        micro = self._schedule.micro_batches(step)
        draws = self._schedule.draws(step)
        batches = tuple(
            self._batch(indices, own, step)
            for indices, own in zip(micro, draws, strict=True)
        )
        return batches[0] if self._schedule.accumulate == 1 else batches

    def _batch(self, indices: BatchIndices, draws: BatchDraws, step: int) -> Batch:
        local = self._shard.rows(indices.bucket.batch_size)
        rows = indices.rows[local]
        # In the whole batch, whoever loads which of its rows.
        places = np.arange(indices.rows.size).reshape(indices.rows.shape)[local]
        bucket = Bucket(len(rows), indices.bucket.seq_len)
        packed = self._schedule.max_segments is not None
        truncate = self._schedule.plan.overlong == "truncate" and not packed
        if self._gathers is not None:
            return self._gathers.collate(
                rows, bucket, pad_value=self._pad_value, truncate=truncate
            )
        examples = [
            self._row(row, place, draws, step)
            for row, place in zip(rows, places, strict=True)
        ]
        collate = functools.partial(
            collate_rows,
            like=self._like(f", for step {step},"),
            sequences=self._sequences,
            pad_value=self._pad_value,
            truncate=truncate,
            capacities=self._schedule.capacities,
        )
        try:
            return collate(examples, bucket, max_segments=self._schedule.max_segments)
        except ValueError:
            # One by one, to find which of them it is.
            every = [x for row in examples for x in row] if packed else examples
            numbers = rows[rows != EMPTY_ROW] if packed else rows
            for index, example in zip(numbers, every, strict=True):
                try:
                    # A `pad_value` that does not fit is not the fault of an example.
                    collate([example], bucket, pad_value=0)
                except ValueError as error:
                    raise ValueError(
                        f"`source[{index}]`, for step {step}: {error}"
                    ) from None
            raise

    @property
    def example(self) -> dict[str, np.ndarray]:
        """`source[0]` as batches have it, transformed: for `batch_specs`."""
        return copied(self._like())

    def position(self, step: int) -> DataPosition:
        """Returns what to save beside a state that has done `step` updates.

        Of a transform it has the name: what the function does is not looked into.
        """
        return self._position(self._schedule, step)

    def _position(self, schedule: Schedule, step: int) -> DataPosition:
        plan = {
            **json.loads(schedule.plan.to_json()),
            "fingerprint": schedule.plan.fingerprint,
        }
        return DataPosition(
            step,
            {name: plan[name] for name in plan if name not in ("format", "version")},
            {
                "examples": len(schedule.lengths),
                "tokens": int(schedule.lengths.sum(dtype=np.int64)),
                "fingerprint": digest(
                    schedule.data_fingerprint.encode(), self._contents.encode()
                ),
            },
            {
                **schedule.traits(),
                "first_step": schedule.first_step,
                "continues": schedule.continues,
                **self._padding_traits(),
                **self._transform_trait(),
                "fingerprint": schedule.fingerprint,
            },
        )

    def _padding_traits(self) -> dict[str, Any]:
        sequences = self._sequences
        if isinstance(sequences, Mapping):
            sequences = {name: listed_names(x) for name, x in sequences.items()}
        elif sequences is not None:
            sequences = listed_names(sequences)
        return {"sequences": sequences, "pad_value": self._pad_value}

    def _transform_trait(self) -> dict[str, str]:
        if self._transform is None:
            return {}
        return {"transform": transform_name(self._transform)}

    def resume(self, position: DataPosition) -> BatchDataset:
        """Returns the batches that follow a position, bit for bit those of its run.

        Raises:
          ValueError: if the plan, the data, the seed, the order, `sequences`,
            `pad_value` or the name of the transform is not what it was; it names what
            has changed. Or if the run ends before the position, or `position` is not a
            `DataPosition`.
        """
        check_position(position)
        schedule = self._schedule
        continues = position.schedule.get("continues")
        if schedule.continues is None and continues is not None:
            # What the run has once deliberately gone on with is no change any more.
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
            schedule = schedule.beginning_at(first_step, continues)
        # Before its end: that of another run says nothing.
        now = self._position(schedule, position.step)
        # Positions of earlier versions do not say how rows are padded.
        unsaid = self._padding_traits().keys() - position.schedule.keys()
        said = {name: x for name, x in now.schedule.items() if name not in unsaid}
        position.check_same(dataclasses.replace(now, schedule=said))
        run_end = self._run_end
        if self._ends_by_itself and schedule is not self._schedule:
            # With the epoch that the position is in, or has just been through.
            done = position.step - schedule.first_step
            run_end = _RunEnd(None, max(1, -(-done // len(schedule))))
        end = run_end.step(schedule)
        if position.step > end:
            raise ValueError(
                f"The run ends at step {end}, before the position's step "
                f"{position.step}. Raise `num_steps` or `num_epochs`."
            )
        return BatchDataset(
            self._source,
            schedule,
            self._shard,
            position.step,
            run_end,
            self._sequences,
            self._pad_value,
            self._transform,
        )

    @functools.cached_property
    def _contents(self) -> str:
        return contents(self._source)

    def _row(self, row: Any, place: Any, draws: BatchDraws, step: int) -> Any:
        """An example, or a list of those of a packed row; None for an empty one."""
        if np.ndim(row):
            both = zip(row.tolist(), place.tolist(), strict=True)
            return [self._example(i, p, draws, step) for i, p in both if i != EMPTY_ROW]
        if row == EMPTY_ROW:
            return None
        return self._example(int(row), int(place), draws, step)

    def _example(self, index: int, place: int, draws: BatchDraws, step: int) -> Example:
        purpose = f", for step {step},"
        example = self._read(index, place, draws, purpose)
        try:
            # One that the source lends is another when the next one is read.
            example = copied(example)
            lengths = self._lengths(example)
        except Exception as error:
            done = "read" if self._transform is None else "transformed"
            raise ValueError(
                f"`source[{index}]`{purpose} cannot be {done}: "
                f"{type(error).__name__}: {error}"
            ) from error
        for name, length in lengths.items():
            measured = int(self._measured(name)[index])
            if length != measured:
                self._refuse_length(index, name, length, measured, step)
        return example

    def _read(self, index: int, place: int, draws: BatchDraws, purpose: str) -> Example:
        """An example, transformed."""
        example = read_example(self._source, index, purpose)
        if self._transform is None:
            return example
        try:
            return apply_transform(self._transform, example, draws.rng(index, place))
        except ValueError as error:
            raise ValueError(
                f"`source[{index}]`{purpose} cannot be transformed: {error}"
            ) from error.__cause__

    def _lengths(self, example: Example) -> dict[str, int]:
        return example_lengths(example, self._sequences, self._schedule.capacities)

    def _measured(self, name: str) -> np.ndarray:
        """`[N]`: the lengths of a sequence that the schedule was made for."""
        parts = self._schedule.parts
        return self._schedule.lengths if parts is None else parts[name]

    def _refuse_length(
        self, index: int, name: str, found: int, measured: int, step: int
    ) -> NoReturn:
        if self._transform is None:
            refuse_changed(index, found, measured)
        try:
            read = self._lengths(self._source[index])[name]
        except Exception:
            # Before it is transformed it may have other features.
            read = measured
        if read != measured:
            refuse_changed(index, read, measured, ", before `transform`,")
        raise ValueError(
            f"`transform` gave `source[{index}]`, for step {step}, the length {found} "
            f"in place of {measured}, by which its batch was planned. Keep the length, "
            "or let `stream_batches(..., transform=)` batch what has another one."
        )

    def _like(self, purpose: str = ",") -> Example:
        """What features all batches have, also one without an example."""
        example = self._first_example
        if example is None:
            purpose = f", whose features all batches have{purpose}"
            draws, *_ = self._schedule.draws(self._schedule.first_step)
            example = self._read(0, 0, draws, purpose)
            collate = functools.partial(
                collate_rows,
                [],
                Bucket(1, self._schedule.plan.max_seq_len),
                sequences=self._sequences,
                capacities=self._schedule.capacities,
            )
            try:
                collate(like=as_arrays(example))
            except ValueError as error:
                raise ValueError(
                    f"`source[0]`, whose features all batches have: {error}"
                ) from None
            collate(like=example, pad_value=self._pad_value)
            self._first_example = example
        return example


def _other_size_message(source: Source, schedule: Schedule) -> str:
    remedy = "Measure the source again."
    if schedule.plan.overlong == "split":
        line = split_line(schedule.plan.max_seq_len)
        remedy = f"Those of chunks, perhaps: `{line}`. If not, measure it again."
    return (
        f"`source` has {len(source)} examples, but the schedule was made for "
        f"{len(schedule.lengths)} lengths. {remedy}"
    )
