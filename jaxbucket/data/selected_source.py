"""Selects a part of a source."""

from __future__ import annotations

from typing import Any, Literal, cast

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.batch import EMPTY_ROW, Batch
from jaxbucket.base.bucket import Bucket
from jaxbucket.base.digest import digest
from jaxbucket.base.padding import PadValue
from jaxbucket.base.selection import selected_indices
from jaxbucket.data.row_checks import check_rows
from jaxbucket.data.source import (
    PackedSource,
    RowSource,
    Source,
    SpanSource,
    check_index,
    fingerprints,
)
from jaxbucket.data.zipped_source import ZippedSource, zip_sources


def select(source: Source, selected: ArrayLike) -> Source:
    """Returns the selected examples of a source, to train on a part of it.

    Select by a condition on lengths or other metrics, and plan with the lengths of the
    same examples. If the source gathers whole batches, as a token file does, so does
    the selection.

    Example:
      >>> source = [{"x": [1]}, {"x": [1, 2, 3]}, {"x": []}, {"x": [1, 2]}]
      >>> lengths = np.array([1, 3, 0, 2])
      >>> kept = lengths >= 2
      >>> part = select(source, kept)
      >>> len(part), part[1], lengths[kept].tolist()
      (2, {'x': [1, 2]}, [3, 2])

    Args:
      source: random-access source of N examples.
      selected: `[N]` bool, whether each example is selected; or `[M]` integers, the
        indices of the examples in their new order. An index may occur several times.

    Returns:
      A source of M examples. Its fingerprint depends on the selection, so that a run
      does not resume with a different one.

    Raises:
      ValueError: if `source` is empty, no example is selected, or `selected` is neither
        `[N]` bool nor valid indices.
    """
    if not len(source):
        raise ValueError("`source` is empty. Pass a source with examples.")
    indices = selected_indices("selected", selected, len(source))
    if isinstance(source, ZippedSource):
        parts = [select(x, indices) for x in source.sources]
        return zip_sources(cast(list[RowSource], parts))
    if isinstance(source, PackedSource) and isinstance(source, SpanSource):
        return _PackedSelection(source, indices)
    if isinstance(source, SpanSource):
        return _SpanSelection(source, indices)
    if isinstance(source, RowSource):
        return _RowSelection(source, indices)
    return _Selection(source, indices)


class _Selection:
    """The selected examples of any source."""

    def __init__(self, source: Any, indices: np.ndarray):
        self._source = source
        self._indices = indices

    @property
    def fingerprint(self) -> str:
        """A digest of the fingerprint of the source and of the selected indices."""
        source = fingerprints([self._source]).encode()
        return digest(source, self._indices.astype("<i8").data)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Any:
        return self._source[int(self._indices[check_index(self, index)])]


class _RowSelection(_Selection):
    """The selected examples of a source that gathers whole rows."""

    @property
    def lengths(self) -> np.ndarray:
        return self._source.lengths[self._indices]

    @property
    def sequences(self) -> tuple[str, ...]:
        return self._source.sequences

    def collate(
        self,
        rows: np.ndarray,
        bucket: Bucket,
        *,
        pad_value: PadValue = 0,
        truncate: bool = False,
    ) -> Batch:
        options = {"pad_value": pad_value, "truncate": truncate}
        return self._source.collate(self._rows(rows, bucket), bucket, **options)

    def _rows(self, rows: np.ndarray, bucket: Bucket) -> np.ndarray:
        """Returns the indices in the source of the examples in each row."""
        rows = check_rows(rows, len(self), bucket)
        return np.where(rows == EMPTY_ROW, EMPTY_ROW, self._indices[rows])


class _SpanSelection(_RowSelection):
    def collate_spans(
        self,
        rows: np.ndarray,
        begins: np.ndarray,
        lengths: np.ndarray,
        bucket: Bucket,
        *,
        pad_value: PadValue = 0,
    ) -> Batch:
        rows = self._rows(rows, bucket)
        return self._source.collate_spans(
            rows, begins, lengths, bucket, pad_value=pad_value
        )


class _PackedSelection(_SpanSelection):
    gathers_packed_rows: Literal[True] = True
