"""Concatenates several sources into one."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from jaxbucket.base.batch import EMPTY_ROW, Batch
from jaxbucket.base.bucket import Bucket
from jaxbucket.base.digest import digest
from jaxbucket.base.padding import PadValue
from jaxbucket.data.example import as_arrays, matching_arrays
from jaxbucket.data.row_checks import check_rows
from jaxbucket.data.sequence_axes import sequence_axes
from jaxbucket.data.source import (
    RowSource,
    Source,
    SpanSource,
    check_index,
    fingerprints,
)
from jaxbucket.data.zipped_source import ZippedSource, zip_sources


def concatenate(sources: Sequence[Source]) -> Source:
    """Concatenates several sources, for a `Mixture` or for one schedule over all.

    If all sources gather whole batches, as token files do, so does the returned source.

    Example:
      >>> both = concatenate([["a", "b"], ["c"]])
      >>> len(both), both[2]
      (3, 'c')

    Args:
      sources: one or more sources, whose examples have the same features.

    Returns:
      A source of the examples of the first source, followed by those of the next ones.

    Raises:
      ValueError: if `sources` is empty, or if sources that gather batches differ in
        features, dtypes or trailing shapes.
    """
    sources = list(sources)
    if not sources:
        raise ValueError("`sources` is empty. Pass at least one source.")
    zipped = [source for source in sources if isinstance(source, ZippedSource)]
    if len(zipped) == len(sources):
        columns = zip(*(source.sources for source in zipped), strict=True)
        return zip_sources([cast(RowSource, concatenate(x)) for x in columns])
    gathering = [source for source in sources if isinstance(source, RowSource)]
    if len(gathering) < len(sources):
        return _Concatenation(sources)
    _check_alike(gathering)
    if all(isinstance(source, SpanSource) for source in gathering):
        return _SpanConcatenation(gathering)
    return _RowConcatenation(gathering)


def _check_alike(sources: Sequence[RowSource]) -> None:
    names = {tuple(source.sequences) for source in sources}
    if len(names) > 1:
        raise ValueError(
            f"`sources` differ in their sequence features: {sorted(names)}. Pass "
            "sources with the same ones."
        )
    template = as_arrays(sources[0][0])
    axes = sequence_axes(template, sources[0].sequences)
    for number, source in enumerate(sources):
        try:
            matching_arrays(source[0], template, axes, 0)
        except ValueError as error:
            raise ValueError(
                f"`sources[{number}]` differs from `sources[0]`: {error}"
            ) from None


class _Concatenation:
    def __init__(self, sources: Sequence[Any]):
        self._sources = sources
        self._ends = np.cumsum([len(source) for source in sources]).tolist()

    @property
    def fingerprint(self) -> str:
        """A digest of the fingerprints of the sources and of their lengths."""
        return digest(f"{fingerprints(self._sources)}\n{self._ends}".encode())

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        index = check_index(self, index)
        which = bisect.bisect_right(self._ends, index)
        return self._sources[which][index - self._start(which)]

    def _start(self, which: int) -> int:
        return self._ends[which - 1] if which else 0


class _RowConcatenation(_Concatenation):
    @property
    def lengths(self) -> np.ndarray:
        return np.concatenate([source.lengths for source in self._sources])

    @property
    def sequences(self) -> tuple[str, ...]:
        return self._sources[0].sequences

    def collate(
        self,
        rows: np.ndarray,
        bucket: Bucket,
        *,
        pad_value: PadValue = 0,
        truncate: bool = False,
    ) -> Batch:
        return self._merged(
            check_rows(rows, len(self), bucket),
            lambda source, local: source.collate(
                local, bucket, pad_value=pad_value, truncate=truncate
            ),
        )

    def _merged(
        self, rows: np.ndarray, gather: Callable[[Any, np.ndarray], Batch]
    ) -> Batch:
        """Merges the batches of all sources, each of which fills only its own rows."""
        which = np.searchsorted(self._ends, rows, side="right")
        which[rows == EMPTY_ROW] = EMPTY_ROW
        present = [int(k) for k in np.unique(which) if k != EMPTY_ROW] or [0]
        parts = []
        for k in present:
            local = np.where(which == k, rows - self._start(k), EMPTY_ROW)
            parts.append(gather(self._sources[k], local))
        merged, *others = parts
        for k, part in zip(present[1:], others, strict=True):
            for target, values in zip(merged, part, strict=True):
                for name in target:
                    target[name][which == k] = values[name][which == k]
        return merged


class _SpanConcatenation(_RowConcatenation):
    def collate_spans(
        self,
        rows: np.ndarray,
        begins: np.ndarray,
        lengths: np.ndarray,
        bucket: Bucket,
        *,
        pad_value: PadValue = 0,
    ) -> Batch:
        return self._merged(
            check_rows(rows, len(self), bucket),
            lambda source, local: source.collate_spans(
                local, begins, lengths, bucket, pad_value=pad_value
            ),
        )
