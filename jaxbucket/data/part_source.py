"""A source whose elements are parts of the examples of a different source."""

from __future__ import annotations

import abc
from typing import Any

import numpy as np

from jaxbucket.base.bucket import Bucket
from jaxbucket.data.derived_source import DerivedSource
from jaxbucket.data.source import SpanSource, check_index


class PartSource(DerivedSource):
    """Base class of sources that split examples into parts.

    A part has a span of each sequence feature, and all other features of its example.

    Attributes:
      lengths: `[M]` int32, the lengths of the parts, read-only.
      sequences: names of the features that are split; None for all with a leading axis.
    """

    _change = "split"

    @abc.abstractmethod
    def _spans(self, parts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the example of each part and its first token in it, both int64."""

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        index = check_index(self, index)
        (example,), (start,) = self._spans(np.array([index]))
        length = int(self.lengths[index])
        if isinstance(self._source, SpanSource):
            return _read_span(self._source, int(example), int(start), length)
        arrays, names = self._read(int(example))
        return {
            name: value[start : start + length] if name in names else value
            for name, value in arrays.items()
        }


def _read_span(
    source: SpanSource, example: int, start: int, length: int
) -> dict[str, Any]:
    """Reads one part without the rest of its example, which may be long."""
    rows, starts, lengths = (np.array([x]) for x in (example, start, length))
    batch = source.collate_spans(rows, starts, lengths, Bucket(1, length), pad_value=0)
    return {name: value[0, ...] for name, value in batch.features.items()}
