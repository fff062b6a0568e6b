"""Reads the batches of a mixture whose components have sources of their own."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NoReturn

from jaxbucket.base.batch import Batch, RowShard
from jaxbucket.base.digest import digest
from jaxbucket.data.batch_reader import BatchReader, FeatureTemplate, make_reader
from jaxbucket.data.example import Example
from jaxbucket.data.source import Source
from jaxbucket.schedule.mixture import ComponentBatch, Mixture


@dataclasses.dataclass(frozen=True, eq=False)
class MixtureReader:
    """Reads the batches of a mixture from a source for each component.

    It has the interface of a `BatchReader`.

    Attributes:
      schedule: the mixture.
      readers: name -> the reader of a component.
      shard: the rows to read of each batch.
    """

    schedule: Mixture
    readers: Mapping[str, BatchReader]
    shard: RowShard

    @property
    def contents(self) -> str:
        """32 hex digits that identify the contents of all sources."""
        return digest(*(x.contents.encode() for x in self.readers.values()))

    @property
    def sequences(self) -> dict[str, Any]:
        """Name -> the padded features of a component."""
        return {name: reader.sequences for name, reader in self.readers.items()}

    @property
    def like(self) -> dict[str, Example]:
        """Name -> the template for the features of a component."""
        result = {}
        for name, reader in self.readers.items():
            with _naming(name):
                result[name] = reader.like
        return result

    @property
    def templates(self) -> list[FeatureTemplate]:
        """The features of the batches of each component."""
        # This reads an example of each source, with the names in errors.
        _ = self.like
        return [
            template._replace(component=name)
            for name, reader in self.readers.items()
            for template in reader.templates
        ]

    def describe(self) -> dict[str, Any]:
        """Returns the options of all components, as plain Python for JSON."""
        options = {name: x.describe() for name, x in self.readers.items()}
        names = dict.fromkeys(option for x in options.values() for option in x)
        return {
            option: {name: options[name].get(option) for name in self.readers}
            for option in names
        }

    def read(self, step: int) -> Batch | tuple[Batch, ...]:
        """Returns the numpy batch of a step, or a tuple of its micro-batches."""
        micro = self.schedule.component_batches(step)
        batches = tuple(self._read_batch(x, step) for x in micro)
        return batches[0] if self.schedule.accumulate == 1 else batches

    def _read_batch(self, batch: ComponentBatch, step: int) -> Batch:
        name = self.schedule.names[batch.component]
        with _naming(name):
            return self.readers[name].read_batch(batch.indices, batch.draws, step)


def make_mixture_reader(
    sources: Mapping[str, Source],
    schedule: Mixture,
    shard: RowShard,
    sequences: Any,
    pad_value: Any,
    transform: Any,
) -> MixtureReader:
    """Returns the reader of a mixture with names.

    Args:
      sources: name -> the source of a component.
      schedule: the mixture.
      shard: the rows to read of each batch.
      sequences: as for `batch_dataset`, for all components; or a mapping with exactly
        the names of the components.
      pad_value: as `sequences`.
      transform: as `sequences`.

    Raises:
      ValueError: if the names differ, an option names only some components, or it does
        not fit its component, which a note names.
    """
    if tuple(sorted(sources)) != tuple(sorted(schedule.names)):
        raise ValueError(
            f"`source` has the names {list(sources)}, and the mixture has "
            f"{list(schedule.names)}. Pass a source for each component."
        )
    _check_sequences(sequences, schedule)
    if _is_partial(transform, schedule):
        _reject_partial("transform", transform, schedule)
    if _is_partial(pad_value, schedule):
        plain = make_mixture_reader(sources, schedule, shard, sequences, 0, transform)
        _check_pad_value(pad_value, plain)
    readers = {}
    for name, component in zip(schedule.names, schedule.schedules, strict=True):
        options: list[Any] = [
            _of_component(value, name, schedule.names)
            for value in (sequences, pad_value, transform)
        ]
        with _naming(name):
            readers[name] = make_reader(sources[name], component, shard, *options)
    return MixtureReader(schedule, readers, shard)


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """Adds the name of a component to the errors of a `with` block."""
    try:
        yield
    except Exception as error:
        error.add_note(f"This is the component {name!r} of the mixture.")
        raise


def _check_sequences(sequences: Any, schedule: Mixture) -> None:
    """Refuses a mapping for some components; its keys may also be sequences."""
    known = [set(component.sequences) for component in schedule.schedules]
    if _is_partial(sequences, schedule) and not _all_have(known, sequences):
        _reject_partial("sequences", sequences, schedule)


def _check_pad_value(pad_value: Mapping[str, Any], reader: MixtureReader) -> None:
    """Refuses a mapping for some components; its keys may also be features.

    Args:
      pad_value: a mapping with the names of some components.
      reader: the reader of the mixture with another `pad_value`.
    """
    is_nested = any(isinstance(value, Mapping) for value in pad_value.values())
    if is_nested or not _all_have(reader.like.values(), pad_value):
        _reject_partial("pad_value", pad_value, reader.schedule)


def _is_partial(value: Any, schedule: Mixture) -> bool:
    """Returns whether an option has the names of some components, but not of all."""
    return isinstance(value, Mapping) and set() < set(value) < set(schedule.names)


def _all_have(components: Iterable[Collection[str]], names: Iterable[str]) -> bool:
    return all(name in known for known in components for name in names)


def _reject_partial(
    label: str, value: Mapping[str, Any], schedule: Mixture
) -> NoReturn:
    raise ValueError(
        f"`{label}` has the names {list(value)}, and the mixture has "
        f"{list(schedule.names)}. Name every component."
    )


def _of_component(value: Any, name: str, names: tuple[str, ...]) -> Any:
    """Returns the value of an option for a component."""
    if isinstance(value, Mapping) and set(value) == set(names):
        return value[name]
    return value
