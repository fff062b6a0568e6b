"""A source whose indices are parts of the examples of another source."""

from __future__ import annotations

import abc
import operator
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.buckets import Bucket
from jaxbucket.base.checks import check_lengths
from jaxbucket.data.example import as_arrays, common_length, sequence_names
from jaxbucket.data.source import (
    RowSource,
    Source,
    SpanSource,
    check_measured,
    check_sequences,
    read_example,
    refuse_changed,
)


class PartSource(abc.ABC):
    """A part has a span of the sequences, and everything else of its example as it is.

    Attributes:
      lengths: `[M]` int32, those of the parts; not to be written to.
      sequences: the features that are cut; None for all with a leading axis.
    """

    lengths: np.ndarray
    # What is done to examples, for messages, because there are two sources.
    _before: ClassVar[str]

    def __init__(
        self, source: Source, lengths: ArrayLike | None, sequences: Sequence[str] | None
    ):
        self.sequences = check_sequences(source, sequences)
        self._source = source
        # A copy, because parts are found by it later, too.
        self._example_lengths = _known_lengths(source, lengths).astype(np.int32)

    @abc.abstractmethod
    def _spans(self, parts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The example of each part, and its first token there, int64."""

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        index = operator.index(index)
        if not 0 <= index < len(self):
            raise IndexError(f"`index={index}` must be from 0 to {len(self) - 1}.")
        (example,), (begin,) = self._spans(np.array([index]))
        length = int(self.lengths[index])
        if isinstance(self._source, SpanSource):
            return _read_span(self._source, int(example), int(begin), length)
        arrays, names = self._read(int(example))
        return {
            name: value[begin : begin + length] if name in names else value
            for name, value in arrays.items()
        }

    def _read(self, index: int) -> tuple[dict[str, np.ndarray], list[str]]:
        """A whole example as arrays, and which of its features are cut."""
        example = read_example(self._source, index, self._before)
        try:
            arrays = as_arrays(example)
            names = sequence_names(arrays, self.sequences)
            length = common_length(arrays, names)
        except ValueError as error:
            raise ValueError(
                f"`source[{index}]`{self._before} cannot be cut: {error}"
            ) from error
        measured = int(self._example_lengths[index])
        if length != measured:
            refuse_changed(index, length, measured, self._before)
        return arrays, names


def _read_span(
    source: SpanSource, example: int, begin: int, length: int
) -> dict[str, Any]:
    """A part of an example, without the rest of it, which may be long."""
    rows, begins, lengths = (np.array([x]) for x in (example, begin, length))
    batch = source.collate_spans(rows, begins, lengths, Bucket(1, length), pad_value=0)
    return {name: value[0, ...] for name, value in batch.features.items()}


def _known_lengths(source: Source, lengths: ArrayLike | None) -> np.ndarray:
    """`[N]`: those of the examples, as they were given or as the source has them."""
    known = source.lengths if isinstance(source, RowSource | PartSource) else None
    lengths = known if lengths is None else lengths
    if lengths is None:
        raise ValueError(
            "`lengths` are missing: the source cannot say how long its examples are. "
            "Pass `lengths=jb.measure_lengths(source)`."
        )
    measured = check_lengths(lengths)
    if len(measured) != len(source):
        raise ValueError(
            f"`lengths` has {len(measured)} entries, but `source` has {len(source)} "
            "examples. Pass the lengths measured of it, before it was cut."
        )
    if known is not None:
        check_measured(known, measured)
    return measured
