"""A source whose elements are parts of the examples of a different source."""

from __future__ import annotations

import abc
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.bucket import Bucket
from jaxbucket.base.checks import check_lengths
from jaxbucket.data.example import as_arrays, common_length, sequence_names
from jaxbucket.data.source import (
    RowSource,
    Source,
    SpanSource,
    check_measured,
    check_sequences,
    raise_length_changed,
    read_example,
)

# Distinguishes the indices of the whole examples from those of their parts in messages.
_UNSPLIT = ", before it was split,"


class PartSource(abc.ABC):
    """Base class of sources that split examples into parts.

    A part has a span of each sequence feature, and all other features of its example.

    Attributes:
      lengths: `[M]` int32, the lengths of the parts, read-only.
      sequences: names of the features that are split; None for all with a leading axis.
    """

    lengths: np.ndarray

    def __init__(
        self, source: Source, lengths: ArrayLike | None, sequences: Sequence[str] | None
    ):
        self.sequences = check_sequences(source, sequences)
        self._source = source
        # Copied, because spans are computed from it later.
        self._example_lengths = _known_lengths(source, lengths).astype(np.int32)

    @abc.abstractmethod
    def _spans(self, parts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the example of each part and its first token in it, both int64."""

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        index = operator.index(index)
        if not 0 <= index < len(self):
            raise IndexError(f"`index={index}` must be from 0 to {len(self) - 1}.")
        (example,), (start,) = self._spans(np.array([index]))
        length = int(self.lengths[index])
        if isinstance(self._source, SpanSource):
            return _read_span(self._source, int(example), int(start), length)
        arrays, names = self._read(int(example))
        return {
            name: value[start : start + length] if name in names else value
            for name, value in arrays.items()
        }

    def _read(self, index: int) -> tuple[dict[str, np.ndarray], list[str]]:
        """Returns an entire example as arrays, and the names of its sequences."""
        example = read_example(self._source, index, _UNSPLIT)
        try:
            arrays = as_arrays(example)
            names = sequence_names(arrays, self.sequences)
            length = common_length(arrays, names)
        except ValueError as error:
            raise ValueError(
                f"`source[{index}]`{_UNSPLIT} cannot be split: {error}"
            ) from error
        measured = int(self._example_lengths[index])
        if length != measured:
            raise_length_changed(index, length, measured, _UNSPLIT)
        return arrays, names


def _read_span(
    source: SpanSource, example: int, start: int, length: int
) -> dict[str, Any]:
    """Reads one part without the rest of its example, which may be long."""
    rows, starts, lengths = (np.array([x]) for x in (example, start, length))
    batch = source.collate_spans(rows, starts, lengths, Bucket(1, length), pad_value=0)
    return {name: value[0, ...] for name, value in batch.features.items()}


def _known_lengths(source: Source, lengths: ArrayLike | None) -> np.ndarray:
    """Returns the `[N]` example lengths, as passed or as declared by the source."""
    known = source.lengths if isinstance(source, RowSource | PartSource) else None
    lengths = known if lengths is None else lengths
    if lengths is None:
        raise ValueError(
            "`lengths` is missing, and the source does not provide lengths. Pass "
            "`lengths=jb.measure_lengths(source)`."
        )
    measured = check_lengths(lengths)
    if len(measured) != len(source):
        raise ValueError(
            f"`lengths` has {len(measured)} entries, but `source` has {len(source)} "
            "examples. Pass the lengths of the examples before they are split."
        )
    if known is not None:
        check_measured(known, measured)
    return measured
