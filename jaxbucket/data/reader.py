"""Reads the batches of a schedule from its sources, limited to one process's rows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import numpy as np

from jaxbucket.base.batch import EMPTY_ROW, Batch, BatchIndices
from jaxbucket.base.bucket import Bucket
from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.checks import check_function
from jaxbucket.base.digest import digest
from jaxbucket.base.notes import Noting
from jaxbucket.base.padding import PadValue, check_pad_value
from jaxbucket.base.row_shard import RowShard
from jaxbucket.data.collate import collate_rows
from jaxbucket.data.example import (
    Example,
    Sequences,
    Transform,
    copy_features,
    transform_name,
)
from jaxbucket.data.example_spec import ExampleSpec, axis_labels
from jaxbucket.data.source import Source, check_length, check_measured, contents
from jaxbucket.data.spans import SpanSource
from jaxbucket.data.token_source import TokenSource
from jaxbucket.data.views import ZippedSource
from jaxbucket.schedule.base import Schedule
from jaxbucket.schedule.example_draws import BatchDraws
from jaxbucket.schedule.mixture import Mixture

_COMPONENT = "This is the component {!r} of the mixture."


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


@dataclasses.dataclass(eq=False)
class BatchReader:
    """Reads the batches of a schedule from a source.

    Attributes:
      source: random-access source of examples.
      schedule: determines which examples fill which bucket at each step.
      shard: the rows to read of each batch.
      sequences: names of the features that are padded; by default those that the source
        declares.
      pad_value: value that fills padded positions.
      transform: function applied to each example, or None.
    """

    source: Source
    schedule: Schedule
    shard: RowShard
    sequences: Sequences
    pad_value: PadValue
    transform: Transform | None = None

    def __post_init__(self):
        # Whether the source makes whole batches.
        self._gathers = False
        source = self.source
        if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
            raise ValueError(
                f"`source` is a {type(source).__name__}. Pass a random-access source, "
                "such as a list, or use `stream_batches`."
            )
        if len(source) != len(self.schedule.lengths):
            raise ValueError(
                f"`source` has {len(source)} examples for {len(self.schedule.lengths)} "
                "lengths. Pass the source (or its `split_source`) that was measured."
            )
        for bucket in self.schedule.buckets:
            self.shard.cut(bucket)
        if self.transform is not None:
            check_function("transform", self.transform, "(example, rng)")
        self.pad_value = check_pad_value(self.pad_value)
        declared: Mapping[str, np.ndarray]
        if isinstance(source, ZippedSource):
            declared, measured = source.lengths, self.schedule.parts or {}
            features = source.features
        elif isinstance(source, TokenSource | SpanSource) and not self.schedule.parts:
            declared, measured = {"": source.lengths}, {"": self.schedule.lengths}
            features = source.sequences
        else:
            return
        if set(declared) != set(measured):
            raise ValueError(
                f"`source` has the sequences {list(declared)}, but the plan has "
                f"{list(measured)}. Plan with `source.lengths`."
            )
        for name, lengths in declared.items():
            check_measured(lengths, measured[name])
        if self.sequences is None:
            self.sequences = features
        can_gather = not isinstance(source, SpanSource) and self.transform is None
        if can_gather and axis_labels(self.sequences) != axis_labels(features):
            raise ValueError(
                f"`sequences={self.sequences}`, but the source has {features}. Remove "
                "`sequences`, or write the files with these sequences."
            )
        self._gathers = can_gather

    @functools.cached_property
    def contents(self) -> str:
        """32 hex digits that identify the contents of the source."""
        return contents(self.source)

    @property
    def templates(self) -> list[FeatureTemplate]:
        """The features of all batches."""
        plans, max_segments = self.schedule.plans, self.schedule.max_segments
        example = copy_features(self.like)
        return [FeatureTemplate(plans, example, self.sequences, max_segments)]

    def describe(self) -> dict[str, Any]:
        """Returns the options, as plain Python for JSON."""
        return {
            "sequences": axis_labels(self.sequences),
            "pad_value": self.pad_value,
            "transform": self.transform and transform_name(self.transform),
        }

    def read(self, step: int) -> Batch | tuple[Batch, ...]:
        """Returns the numpy batch of a step, or a tuple of its micro-batches."""
        parts = self.schedule.drawn_batches(step)
        batches = tuple(self.read_batch(*part, step) for part in parts)
        return batches[0] if self.schedule.accumulate == 1 else batches

    def read_batch(self, indices: BatchIndices, draws: BatchDraws, step: int) -> Batch:
        """Returns one numpy batch.

        Args:
          indices: the bucket, and the examples in its rows.
          draws: the random numbers for the examples.
          step: the step of the run, for messages.
        """
        local = self.shard.of(indices.bucket).rows(indices.bucket.batch_size)
        rows = indices.rows[local]
        bucket = Bucket(len(rows), indices.bucket.seq_len)
        policies = {
            "truncate": self.schedule.plans[0].truncates,
            "truncate_left": self.schedule.plans[0].truncates_left,
        }
        if self._gathers:
            source = cast(Any, self.source)
            return source.collate(rows, bucket, pad_value=self.pad_value, **policies)
        # Places in the global batch, so that random numbers do not depend on the shard.
        places = np.arange(indices.rows.size).reshape(indices.rows.shape)[local]
        examples = [
            self._row(row, place, draws, step)
            for row, place in zip(rows, places, strict=True)
        ]
        with Noting(f"The rows of step {step} are the examples {rows.tolist()}."):
            return collate_rows(
                examples,
                bucket,
                like=self.like,
                sequences=self.sequences,
                pad_value=self.pad_value,
                max_segments=self.schedule.max_segments,
                **policies,
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
        with Noting(f"This is `source[{index}]`, for step {step}."):
            example = self._transformed(index, place, draws)
            # The source may reuse its arrays for the next example.
            example = copy_features(example)
            self._check_lengths(index, example)
        return example

    def _transformed(self, index: int, place: int, draws: BatchDraws) -> Example:
        example = self.source[index]
        if self.transform is None:
            return example
        # A copy, because the source may reuse its arrays.
        return self.transform(copy_features(example), draws.rng(index, place))

    def _check_lengths(self, index: int, example: Example) -> None:
        """Raises a ValueError unless an example has the lengths that were measured."""
        parts, names = self.schedule.parts, self.schedule.plans[0].sequences
        lengths = ExampleSpec(example, self.sequences, names).lengths()
        for name, length in lengths.items():
            which, measured = "", self.schedule.lengths
            if parts is not None:
                which, measured = f", sequence {name!r},", parts[name]
            if self.transform is not None:
                which += " after `transform`, which must keep the length,"
            check_length(index, length, int(measured[index]), which)

    @functools.cached_property
    def like(self) -> Example:
        """`source[0]` after `transform`, the template for the features of batches."""
        bucket = Bucket(1, self.schedule.buckets[-1].seq_len)
        options = {"sequences": self.sequences, "pad_value": self.pad_value}
        with Noting("This is `source[0]`, the template for all batches."):
            example = self._transformed(0, 0, next(self.schedule.drawn_batches(0))[1])
            collate_rows([], bucket, like=example, **options)
        return example


class MixtureReader:
    """Reads the batches of a mixture from a source for each component.

    It has the interface of a `BatchReader`.

    Args:
      sources: name -> the source of a component.
      schedule: the mixture, with the same names.
      shard: the rows to read of each batch.
      options: the options of a `BatchReader`, each for all components, or a mapping
        with exactly the names of the components.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        schedule: Mixture,
        shard: RowShard,
        **options: Any,
    ):
        names = set(schedule.names)
        if set(sources) != names:
            raise ValueError(
                f"`source` has the names {list(sources)}, and the mixture has "
                f"{list(schedule.names)}. Pass a source for each component."
            )
        self.schedule = schedule
        self.readers: dict[str, BatchReader] = {}
        for name, component in zip(schedule.names, schedule.schedules, strict=True):
            of_component: dict[str, Any] = {
                option: value[name]
                if isinstance(value, Mapping) and set(value) == names
                else value
                for option, value in options.items()
            }
            with Noting(_COMPONENT.format(name)):
                reader = BatchReader(sources[name], component, shard, **of_component)
                self.readers[name] = reader

    @property
    def contents(self) -> str:
        """32 hex digits that identify the contents of all sources."""
        return digest(*(x.contents.encode() for x in self.readers.values()))

    @property
    def templates(self) -> list[FeatureTemplate]:
        """The features of the batches of each component."""
        templates = []
        for name, reader in self.readers.items():
            with Noting(_COMPONENT.format(name)):
                templates += [x._replace(component=name) for x in reader.templates]
        return templates

    def describe(self) -> dict[str, Any]:
        """Returns the options of all components, as plain Python for JSON."""
        options = {name: x.describe() for name, x in self.readers.items()}
        return {
            option: {name: options[name][option] for name in options}
            for option in ("sequences", "pad_value", "transform")
        }

    def read(self, step: int) -> Batch | tuple[Batch, ...]:
        """Returns the numpy batch of a step, or a tuple of its micro-batches."""
        batches = []
        for component, indices, draws in self.schedule.component_parts(step):
            name = self.schedule.names[component]
            with Noting(_COMPONENT.format(name)):
                batches.append(self.readers[name].read_batch(indices, draws, step))
        return batches[0] if self.schedule.accumulate == 1 else tuple(batches)
