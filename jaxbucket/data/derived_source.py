"""A source whose elements are made of the examples of a different source."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.checks import check_lengths
from jaxbucket.data.example import as_arrays, common_length, sequence_names
from jaxbucket.data.source import (
    RowSource,
    Source,
    check_measured,
    check_sequences,
    raise_length_changed,
    read_example,
)


class DerivedSource(abc.ABC):
    """Base class of sources that split or join the examples of another source.

    Attributes:
      lengths: `[M]` int32, the lengths of the elements, read-only.
      sequences: names of the sequence features; None for all with a leading axis.
    """

    lengths: np.ndarray
    # "split" or "joined", to tell examples from elements in messages.
    _change: str

    def __init__(
        self, source: Source, lengths: ArrayLike | None, sequences: Sequence[str] | None
    ):
        self.sequences = check_sequences(source, sequences)
        self._source = source
        # Copied, because elements are computed from it later.
        self._example_lengths = self._known_lengths(lengths).astype(np.int32)

    @abc.abstractmethod
    def __getitem__(self, index: int) -> dict[str, np.ndarray]: ...

    def __len__(self) -> int:
        return len(self.lengths)

    def _read(self, index: int) -> tuple[dict[str, np.ndarray], list[str]]:
        """Returns an entire example as arrays, and the names of its sequences."""
        which = f", before it was {self._change},"
        example = read_example(self._source, index, which)
        try:
            arrays = as_arrays(example)
            names = sequence_names(arrays, self.sequences)
            length = common_length(arrays, names)
        except ValueError as error:
            raise ValueError(
                f"`source[{index}]`{which} cannot be {self._change}: {error}"
            ) from error
        measured = int(self._example_lengths[index])
        if length != measured:
            raise_length_changed(index, length, measured, which)
        return arrays, names

    def _known_lengths(self, lengths: ArrayLike | None) -> np.ndarray:
        """Returns the `[N]` example lengths, as passed or as declared by the source."""
        source, known = self._source, None
        if isinstance(source, RowSource | DerivedSource):
            known = source.lengths
        lengths = known if lengths is None else lengths
        if lengths is None:
            raise ValueError(
                "`lengths` is missing, and the source does not provide lengths. Pass "
                "`lengths=jb.measure_lengths(source)`."
            )
        measured = check_lengths(lengths)
        if len(measured) != len(source):
            raise ValueError(
                f"`lengths` has {len(measured)} entries, but `source` has "
                f"{len(source)} examples. Pass the lengths of the examples before they "
                f"are {self._change}."
            )
        if known is not None:
            check_measured(known, measured)
        return measured
