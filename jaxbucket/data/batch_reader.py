"""Reads the batches of a schedule from a source, limited to one process's rows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, cast

import numpy as np

from jaxbucket.base.batch import EMPTY_ROW, Batch, BatchIndices, RowShard
from jaxbucket.base.bucket import Bucket
from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.checks import split_line
from jaxbucket.base.padding import PadValue, check_pad_value
from jaxbucket.data.collate import collate_rows
from jaxbucket.data.derived_source import DerivedSource
from jaxbucket.data.example import (
    Example,
    Sequences,
    as_arrays,
    copy_features,
)
from jaxbucket.data.sequence_axes import axis_labels, example_lengths
from jaxbucket.data.source import (
    RowSource,
    Source,
    SpanSource,
    check_measured,
    check_sequences,
    contents,
    gathers,
    raise_length_changed,
    read_example,
)
from jaxbucket.data.transform import (
    Transform,
    apply_transform,
    check_transform,
    transform_name,
)
from jaxbucket.data.zipped_source import ZippedSource
from jaxbucket.schedule.base import Schedule
from jaxbucket.schedule.example_draws import BatchDraws


def padded_features(
    source: Source, schedule: Schedule, sequences: Sequences
) -> Sequences:
    """Returns the features to pad, by default those that the source declares."""
    if sequences is None and isinstance(source, ZippedSource):
        return source.features
    if (
        sequences is None
        and not schedule.sequences
        and isinstance(source, RowSource | DerivedSource)
    ):
        # These also apply if its examples are read one at a time.
        return source.sequences
    return sequences


class FeatureTemplate(NamedTuple):
    """What determines the arrays of batches, besides their bucket.

    Attributes:
      plans: the plans of the batches.
      example: an example, for its features and dtypes.
      sequences: the features that are padded.
      max_segments: the maximum number of examples in a packed row, or None.
      component: the name of the component of a mixture; empty if it has no names.
    """

    plans: tuple[BucketPlan, ...]
    example: Example
    sequences: Sequences
    max_segments: int | None
    component: str = ""


def make_reader(
    source: Source,
    schedule: Schedule,
    shard: RowShard,
    sequences: Sequences,
    pad_value: PadValue,
    transform: Transform | None,
) -> BatchReader:
    """Returns the reader of a source, after checking its options.

    Raises:
      ValueError: if the source is not random-access, or an option is invalid.
    """
    for method in ("__len__", "__getitem__"):
        if not hasattr(source, method):
            raise ValueError(
                f"`source` is a {type(source).__name__}, which has no `{method}`. Pass "
                "a random-access source, such as a list, or use `stream_batches` for "
                "a stream of examples."
            )
    return BatchReader(
        source,
        schedule,
        shard,
        padded_features(source, schedule, sequences),
        check_pad_value(pad_value),
        check_transform(transform),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class BatchReader:
    """Reads the batches of a schedule from a source.

    Attributes:
      source: random-access source of examples.
      schedule: determines which examples fill which bucket at each step.
      shard: the rows to read of each batch.
      sequences: names of the features that are padded.
      pad_value: value that fills padded positions.
      transform: function applied to each example, or None.

    Raises:
      ValueError: if the numbers of examples and lengths differ, if the source declares
        different lengths or sequences, or if the shard does not divide a bucket.
    """

    source: Source
    schedule: Schedule
    shard: RowShard
    sequences: Sequences
    pad_value: PadValue
    transform: Transform | None = None
    _row_source: RowSource | None = dataclasses.field(default=None, init=False)
    _zipped: ZippedSource | None = dataclasses.field(default=None, init=False)

    def __post_init__(self):
        if len(self.source) != len(self.schedule.lengths):
            raise ValueError(_size_mismatch_message(self.source, self.schedule))
        for bucket in self.schedule.buckets:
            self.shard.part_size(bucket.batch_size)
        # A row source gathers whole rows only if each example has one length and is not
        # transformed.
        if (
            isinstance(self.source, RowSource)
            and not self.schedule.sequences
            and not isinstance(self.sequences, Mapping)
            and self.transform is None
        ):
            check_sequences(self.source, self.sequences)
            check_measured(self.source.lengths, self.schedule.lengths)
            packed = self.schedule.max_segments is not None
            left = bool(self.schedule.truncates_left)
            if gathers(self.source, packed, left):
                object.__setattr__(self, "_row_source", self.source)
        if isinstance(self.source, ZippedSource):
            self._set_zipped(self.source)

    def _set_zipped(self, source: ZippedSource) -> None:
        """Lets the source gather whole batches, if it can."""
        parts = self.schedule.parts
        if parts is None or list(parts) != list(source.lengths):
            raise ValueError(
                f"`source` has the sequences {list(source.lengths)}, but the plan has "
                f"{list(parts or ())}. Plan with `source.lengths`."
            )
        for name, lengths in source.lengths.items():
            check_measured(lengths, parts[name])
        packed = self.schedule.max_segments is not None
        left = cast(list[str], self.schedule.truncates_left)
        # A transform may add features, and needs the examples one at a time.
        if self.transform is not None:
            return
        source.check_features(self.sequences)
        if source.gathers(packed, left):
            object.__setattr__(self, "_zipped", source)

    @functools.cached_property
    def contents(self) -> str:
        """32 hex digits that identify the contents of the source."""
        return contents(self.source)

    @property
    def templates(self) -> list[FeatureTemplate]:
        """The features of all batches."""
        schedule = self.schedule
        example = copy_features(self.like)
        template = (schedule.plans, example, self.sequences, schedule.max_segments)
        return [FeatureTemplate(*template)]

    def describe(self) -> dict[str, Any]:
        """Returns the options, as plain Python for JSON."""
        options = {
            "sequences": axis_labels(self.sequences),
            "pad_value": self.pad_value,
        }
        if self.transform is not None:
            options["transform"] = transform_name(self.transform)
        return options

    def read(self, step: int) -> Batch | tuple[Batch, ...]:
        """Returns the numpy batch of a step, or a tuple of its micro-batches."""
        micro = zip(
            self.schedule.micro_batches(step), self.schedule.draws(step), strict=True
        )
        batches = tuple(
            self.read_batch(indices, draws, step) for indices, draws in micro
        )
        return batches[0] if self.schedule.accumulate == 1 else batches

    def read_batch(self, indices: BatchIndices, draws: BatchDraws, step: int) -> Batch:
        """Returns one numpy batch.

        Args:
          indices: the bucket, and the examples in its rows.
          draws: the random numbers for the examples.
          step: the step of the run, for messages.
        """
        local = self.shard.rows(indices.bucket.batch_size)
        rows = indices.rows[local]
        bucket = Bucket(len(rows), indices.bucket.seq_len)
        packed = self.schedule.max_segments is not None
        truncate = self.schedule.truncates
        truncate_left = self.schedule.truncates_left
        if self._zipped is not None:
            return self._zipped.collate_sequences(
                rows,
                bucket,
                pad_value=self.pad_value,
                truncate=cast(list[str], truncate),
                truncate_left=cast(list[str], truncate_left),
            )
        if self._row_source is not None:
            if truncate_left:
                return self._ends(rows, bucket)
            return self._row_source.collate(
                rows, bucket, pad_value=self.pad_value, truncate=bool(truncate)
            )
        # Places in the global batch, so that random numbers do not depend on the shard.
        places = np.arange(indices.rows.size).reshape(indices.rows.shape)[local]
        examples = [
            self._row(row, place, draws, step)
            for row, place in zip(rows, places, strict=True)
        ]
        collate = functools.partial(
            collate_rows,
            bucket=bucket,
            like=self.like,
            sequences=self.sequences,
            truncate=truncate,
            truncate_left=truncate_left,
        )
        try:
            return collate(
                examples,
                pad_value=self.pad_value,
                max_segments=self.schedule.max_segments,
            )
        except ValueError:
            if packed:
                rows = rows[rows != EMPTY_ROW]
                examples = [example for row in examples for example in row]
            _check_each(collate, rows, examples, step)
            # No single example is at fault, so it is the `pad_value` that does not fit.
            raise

    def _ends(self, rows: np.ndarray, bucket: Bucket) -> Batch:
        """Returns the batch of at most the last T tokens of each example."""
        lengths = self.schedule.lengths[rows]
        kept = np.minimum(lengths, bucket.tokens_per_row)
        return cast(SpanSource, self._row_source).collate_spans(
            rows, lengths - kept, kept, bucket, pad_value=self.pad_value
        )

    def _row(self, row: Any, place: Any, draws: BatchDraws, step: int) -> Any:
        """Returns the example of a row, the list of a packed row, or None if empty."""
        if np.ndim(row):
            pairs = zip(row.tolist(), place.tolist(), strict=True)
            return [
                self._example(i, p, draws, step) for i, p in pairs if i != EMPTY_ROW
            ]
        if row == EMPTY_ROW:
            return None
        return self._example(int(row), int(place), draws, step)

    def _example(self, index: int, place: int, draws: BatchDraws, step: int) -> Example:
        purpose = f", for step {step},"
        example = self._transformed(index, place, draws, purpose)
        try:
            # The source may reuse its arrays for the next example.
            example = copy_features(example)
            lengths = self._lengths(example)
        except Exception as error:
            action = "read" if self.transform is None else "transformed"
            raise ValueError(
                f"`source[{index}]`{purpose} cannot be {action}: "
                f"{type(error).__name__}: {error}"
            ) from error
        parts = self.schedule.parts
        for name, length in lengths.items():
            measured = self.schedule.lengths if parts is None else parts[name]
            if length != measured[index]:
                self._reject_length(index, name, length, int(measured[index]), step)
        return example

    def _transformed(
        self, index: int, place: int, draws: BatchDraws, purpose: str
    ) -> Example:
        example = read_example(self.source, index, purpose)
        if self.transform is None:
            return example
        try:
            return apply_transform(self.transform, example, draws.rng(index, place))
        except ValueError as error:
            raise ValueError(
                f"`source[{index}]`{purpose} cannot be transformed: {error}"
            ) from error.__cause__

    def _lengths(self, example: Example) -> dict[str, int]:
        names = self.schedule.sequences
        return example_lengths(example, self.sequences, names)

    def _reject_length(
        self, index: int, name: str, length: int, measured: int, step: int
    ) -> NoReturn:
        which = f", sequence {name!r}," if self.schedule.sequences else ""
        if self.transform is None:
            raise_length_changed(index, length, measured, which)
        try:
            before = self._lengths(self.source[index])[name]
        except Exception:
            # The untransformed example may have different features.
            before = measured
        if before != measured:
            which = f"{which.removesuffix(',')}, before `transform`,"
            raise_length_changed(index, before, measured, which)
        raise ValueError(
            f"`transform` changed the length of `source[{index}]`, for step {step}, "
            f"from {measured} to {length}, but its batch was planned for {measured}. "
            "Keep the length, or use `stream_batches(..., transform=)`, which batches "
            "transformed examples by their new lengths."
        )

    @functools.cached_property
    def like(self) -> Example:
        """`source[0]` after `transform`, the template for the features of all batches.

        Raises:
          ValueError: if the example cannot be read, or cannot be part of a batch.
        """
        purpose = ", the template for all batches,"
        draws, *_ = self.schedule.draws(self.schedule.first_step)
        example = self._transformed(0, 0, draws, purpose)
        collate = functools.partial(
            collate_rows,
            [],
            Bucket(1, self.schedule.buckets[-1].seq_len),
            sequences=self.sequences,
        )
        try:
            collate(like=as_arrays(example))
        except ValueError as error:
            raise ValueError(f"`source[0]`{purpose[:-1]}: {error}") from None
        collate(like=example, pad_value=self.pad_value)
        return example


def _check_each(
    collate: Callable[..., Batch],
    indices: np.ndarray,
    examples: Sequence[Example | None],
    step: int,
) -> None:
    """Raises a ValueError that names the first example that cannot be collated."""
    for index, example in zip(indices, examples, strict=True):
        try:
            collate([example])
        except ValueError as error:
            raise ValueError(f"`source[{index}]`, for step {step}: {error}") from None


def _size_mismatch_message(source: Source, schedule: Schedule) -> str:
    remedy = "Measure the source again."
    if schedule.plans[0].overlong == "split":
        line = split_line(schedule.plans[0].max_seq_len)
        remedy = f"If they are lengths of chunks, use `{line}`. If not, measure again."
    return (
        f"`source` has {len(source)} examples, but the schedule was made for "
        f"{len(schedule.lengths)} lengths. {remedy}"
    )
