"""Reads the batches of a mixture whose components have sources of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxbucket.base.batch import Batch
from jaxbucket.base.digest import digest
from jaxbucket.base.notes import Noting
from jaxbucket.base.row_shard import RowShard
from jaxbucket.data.example import Example
from jaxbucket.data.reader import BatchReader, FeatureTemplate
from jaxbucket.data.source import Source
from jaxbucket.schedule.mixture import Mixture

_NOTE = "This is the component {!r} of the mixture."


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
    def like(self) -> dict[str, Example]:
        """Name -> the template for the features of a component."""
        return self._each("like")

    @property
    def templates(self) -> list[FeatureTemplate]:
        """The features of the batches of each component."""
        templates = self._each("templates").items()
        return [x._replace(component=name) for name, each in templates for x in each]

    def _each(self, attribute: str) -> dict[str, Any]:
        """Returns name -> an attribute of the reader of this component."""
        values = {}
        for name, reader in self.readers.items():
            with Noting(_NOTE.format(name)):
                values[name] = getattr(reader, attribute)
        return values

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
            with Noting(_NOTE.format(name)):
                batches.append(self.readers[name].read_batch(indices, draws, step))
        return batches[0] if self.schedule.accumulate == 1 else tuple(batches)


def make_mixture_reader(
    sources: Mapping[str, Source],
    schedule: Mixture,
    shard: RowShard,
    **options: Any,
) -> MixtureReader:
    """Returns the reader of a mixture with names.

    Args:
      sources: name -> the source of a component.
      schedule: the mixture.
      shard: the rows to read of each batch.
      options: the options of a `BatchReader`, each for all components, or a mapping
        with exactly the names of the components.
    """
    if set(sources) != set(schedule.names):
        raise ValueError(
            f"`source` has the names {list(sources)}, and the mixture has "
            f"{list(schedule.names)}. Pass a source for each component."
        )
    readers = {}
    for name, component in zip(schedule.names, schedule.schedules, strict=True):
        of_component: dict[str, Any] = {
            option: value[name]
            if isinstance(value, Mapping) and set(value) == set(schedule.names)
            else value
            for option, value in options.items()
        }
        with Noting(_NOTE.format(name)):
            readers[name] = BatchReader(sources[name], component, shard, **of_component)
    return MixtureReader(schedule, readers, shard)
