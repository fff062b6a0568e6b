"""From a source of examples to a `grain.MapDataset` of batches."""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol, overload, runtime_checkable

import grain
import numpy as np

from jaxbucket.base import EMPTY_ROW, Batch, Bucket, RowShard, digest
from jaxbucket.checks import MAX_LENGTH, check_integer
from jaxbucket.collate import collate_rows
from jaxbucket.example import Example, example_length
from jaxbucket.position import DataPosition
from jaxbucket.schedule import BatchSchedule

# How many examples stand for the contents of all.
_SAMPLES = 16


class Source(Protocol):
    """Random access to examples: a list, a `grain` source or `MapDataset`, ..."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@runtime_checkable
class RowSource(Protocol):
    """A source that gathers the rows of a batch at once, such as a `TokenFile`.

    Attributes:
      lengths: `[N]` int32, known without reading an example.
      sequences: the features that are padded.
    """

    @property
    def lengths(self) -> np.ndarray: ...

    @property
    def sequences(self) -> tuple[str, ...]: ...

    def collate(
        self, rows: np.ndarray, bucket: Bucket, *, pad_value: float, truncate: bool
    ) -> Batch: ...


def measure_lengths(
    source: Source,
    *,
    length_fn: Callable[[Any], int] | None = None,
    sequences: Sequence[str] | None = None,
    progress: bool = True,
) -> np.ndarray:
    """Returns the length of every example, in one pass over the source.

    Example:
      >>> measure_lengths([{"tokens": [1, 2, 3]}, {"tokens": [4]}], progress=False)
      array([3, 1], dtype=int32)

    Args:
      source: examples by index.
      length_fn: example -> length; by default the common length of its `sequences`.
      sequences: the features that will be padded, by default all with a leading axis.
      progress: show a progress bar on a terminal.

    Returns:
      `[N]` int32.

    Raises:
      ValueError: if the source is empty, or an example has no positive length.
    """
    from rich.progress import track

    size = len(source)
    if size == 0:
        raise ValueError("`source` is empty: there is no example to measure.")
    if length_fn is None:
        if isinstance(source, RowSource):
            _check_sequences(source, sequences)
            return source.lengths
        length_fn = functools.partial(example_length, sequences=sequences)
    lengths = np.empty(size, np.int32)
    indices = track(
        range(size), "Measuring lengths", disable=not progress, transient=True
    )
    for index in indices:
        try:
            length = length_fn(source[index])
        except ValueError as error:
            raise ValueError(f"`source[{index}]`: {error}") from error
        lengths[index] = _checked_length(index, length)
    return lengths


def _check_sequences(source: RowSource, sequences: Sequence[str] | None) -> None:
    if sequences is not None and list(sequences) != list(source.sequences):
        raise ValueError(
            f"`sequences={list(sequences)}`: the source has {list(source.sequences)}, "
            "by itself. Leave them out, or write it with these."
        )


def _checked_length(index: int, length: Any) -> int:
    try:
        whole = operator.index(length)
    except TypeError:
        whole = 0
    if not 1 <= whole <= MAX_LENGTH:
        raise ValueError(
            f"`source[{index}]` has length {length!r}, which is no integer from 1 to "
            f"{MAX_LENGTH}. Leave the example out, or mend `length_fn`."
        )
    return whole


def _to_bytes(example: Example) -> bytes:
    parts = []
    for name in sorted(example):
        value = np.asarray(example[name])
        parts += [name, value.dtype.str, str(value.shape)]
        parts.append(str(value.tolist() if value.dtype.hasobject else value.tobytes()))
    return "\n".join(parts).encode()


def batch_dataset(
    source: Source,
    schedule: BatchSchedule,
    *,
    shard: RowShard | None = None,
    start_step: int | None = None,
    num_steps: int | None = None,
    sequences: Sequence[str] | None = None,
    pad_value: float = 0,
) -> BatchDataset:
    """Returns the schedule's batches as a `grain.MapDataset`, numpy arrays.

    Element 0 is the batch of `start_step`, so that resuming takes one integer. Only
    the examples in the rows of `shard` are read.

    Example:
      >>> from jaxbucket import plan_buckets
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
      num_steps: where the run ends, counted from step 0 and over epochs. By default
        the end of the epoch that `start_step` is in.
      sequences: the features that are padded, by default all with a leading axis.
      pad_value: what fills them behind their end.

    Raises:
      ValueError: if the source has not one example for each length, the shard's parts
        do not divide a bucket, or the steps are negative or in the wrong order. And
        from an element, if an example is not as long as it was measured.
    """
    return BatchDataset(
        source,
        schedule,
        shard or RowShard(),
        start_step,
        num_steps,
        sequences,
        pad_value,
    )


class BatchDataset(grain.MapDataset[Batch]):
    """What `batch_dataset` returns; elements beyond its length are later steps."""

    def __init__(
        self,
        source: Source,
        schedule: BatchSchedule,
        shard: RowShard,
        start_step: int | None,
        num_steps: int | None,
        sequences: Sequence[str] | None,
        pad_value: float,
    ):
        super().__init__()
        if len(source) != len(schedule.lengths):
            raise ValueError(
                f"`source` has {len(source)} examples, but the schedule was made for "
                f"{len(schedule.lengths)} lengths. Measure the source again."
            )
        if isinstance(source, RowSource):
            _check_sequences(source, sequences)
            changed = np.flatnonzero(source.lengths != schedule.lengths)
            if len(changed):
                _refuse_changed(changed[0], source.lengths, schedule.lengths)
        for bucket in schedule.plan.buckets:
            shard.part_size(bucket.batch_size)
        first_step = schedule.first_step
        if start_step is None:
            start_step = first_step
        start_step = check_integer("start_step", start_step)
        if num_steps is None:
            epochs = (start_step - first_step) // len(schedule) + 1
            num_steps = first_step + epochs * len(schedule)
        if not first_step <= start_step <= check_integer("num_steps", num_steps):
            raise ValueError(
                f"`start_step={start_step}` must be between {first_step} and the end "
                f"of the run, `num_steps={num_steps}`."
            )
        self._source = source
        self._row_source = source if isinstance(source, RowSource) else None
        self._schedule = schedule
        self._shard = shard
        self._start_step = start_step
        self._num_steps = num_steps
        self._sequences = sequences
        self._pad_value = pad_value

    def __len__(self) -> int:
        return self._num_steps - self._start_step

    @overload
    def __getitem__(self, index: slice) -> grain.MapDataset[Batch]: ...

    @overload
    def __getitem__(self, index: int) -> Batch: ...

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self.slice(index)
        if index < 0:
            raise IndexError(f"`index={index}` must not be negative.")
        step = self._start_step + index
        indices = self._schedule[step]
        rows = indices.rows[self._shard.rows(indices.bucket.batch_size)]
        bucket = Bucket(len(rows), indices.bucket.seq_len)
        truncate = self._schedule.plan.overlong == "truncate"
        if self._row_source is not None:
            return self._row_source.collate(
                rows, bucket, pad_value=self._pad_value, truncate=truncate
            )
        return collate_rows(
            [None if r == EMPTY_ROW else self._example(int(r), step) for r in rows],
            bucket,
            like=self._first_example,
            sequences=self._sequences,
            pad_value=self._pad_value,
            truncate=truncate,
        )

    def position(self, step: int) -> DataPosition:
        """Returns what to save beside a state that has done `step` updates."""
        schedule = self._schedule
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
                "seed": schedule.seed,
                "order": schedule.order,
                "remainder": schedule.remainder,
                "opening": schedule.opening_pairs,
                "first_step": schedule.first_step,
                "continues": schedule.continues,
                "fingerprint": schedule.fingerprint,
            },
        )

    def resume(self, position: DataPosition) -> BatchDataset:
        """Returns the batches that follow a position, bit for bit those of its run.

        Raises:
          ValueError: if the plan, the data, the seed or the order is not what it was;
            it names what has changed.
        """
        schedule = self._schedule
        continues = position.schedule.get("continues")
        if schedule.continues is None and continues is not None:
            # What the run has once deliberately gone on with is no change any more.
            schedule = schedule.beginning_at(position.schedule["first_step"], continues)
        if position.step > self._num_steps:
            raise ValueError(
                f"The run ends at `num_steps={self._num_steps}`, before the "
                f"position's step {position.step}. Raise `num_steps`."
            )
        position.check_same(self._following(schedule, None).position(position.step))
        return self._following(schedule, position.step)

    def _following(self, schedule: BatchSchedule, start: int | None) -> BatchDataset:
        return BatchDataset(
            self._source,
            schedule,
            self._shard,
            start,
            self._num_steps,
            self._sequences,
            self._pad_value,
        )

    @functools.cached_property
    def _contents(self) -> str:
        """Names some fixed examples, and the source if it can name itself."""
        some = np.unique(np.linspace(0, len(self._source) - 1, _SAMPLES).astype(int))
        own = str(getattr(self._source, "fingerprint", ""))
        return digest(own.encode(), *(_to_bytes(self._source[int(i)]) for i in some))

    def _example(self, index: int, step: int) -> Example:
        try:
            example = self._source[index]
            length = example_length(example, self._sequences)
        except Exception as error:
            raise ValueError(
                f"`source[{index}]`, for step {step}, cannot be read: "
                f"{type(error).__name__}: {error}"
            ) from error
        if length != self._schedule.lengths[index]:
            _refuse_changed(index, {index: length}, self._schedule.lengths)
        return example

    @functools.cached_property
    def _first_example(self) -> Example:
        return self._source[0]


def _refuse_changed(index: int, found: Any, measured: np.ndarray) -> NoReturn:
    raise ValueError(
        f"`source[{index}]` has length {found[index]}, but `lengths[{index}]="
        f"{measured[index]}`: the data changed since it was measured. Measure again."
    )
