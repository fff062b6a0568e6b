"""A source that splits examples that are too long into chunks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.batch import EMPTY_ROW, Batch
from jaxbucket.base.bucket import Bucket
from jaxbucket.base.checks import MAX_LENGTH, check_positive
from jaxbucket.base.digest import digest
from jaxbucket.base.padding import PadValue
from jaxbucket.data.part_source import PartSource
from jaxbucket.data.row_checks import check_row_lengths, check_rows, span_lengths
from jaxbucket.data.source import RowSource, Source, SpanSource, contents
from jaxbucket.plan.chunks import chunk_counts, chunk_lengths


def split_source(
    source: Source,
    max_seq_len: int,
    *,
    lengths: ArrayLike | None = None,
    sequences: Sequence[str] | None = None,
) -> ChunkSource:
    """Splits every example longer than `max_seq_len` into chunks.

    Each element of the returned source is a chunk, and the chunks of an example are
    consecutive. A chunk has its span of each sequence feature, and all other features
    of its example unchanged. Every token is in exactly one chunk. Positions restart at
    0 in each chunk.

    If the source gathers whole batches, as a token file does, so does the returned
    source. For all other sources, reading a chunk reads its whole example.

    Example:
      >>> examples = [{"x": [1, 2], "name": 7}, {"x": [3, 4, 5, 6, 7], "name": 8}]
      >>> source = split_source(examples, 2, lengths=[2, 5])
      >>> source.lengths
      array([2, 2, 2, 1], dtype=int32)
      >>> source[2]
      {'x': array([5, 6]), 'name': array(8)}
      >>> source.example_of([0, 2])
      (array([0, 1]), array([0, 1]))

    Args:
      source: random-access source of examples, which are dicts of arrays.
      max_seq_len: maximum number of tokens in a chunk, the plan's `max_seq_len`.
      lengths: `[N]` integers, the lengths of the examples, from `measure_lengths`. Not
        needed if the source provides them, as a token file does.
      sequences: names of the features that are split. By default all features with a
        leading axis.

    Returns:
      The source of chunks.

    Raises:
      ValueError: if `max_seq_len` is not positive, or `lengths` or `sequences` are
        missing or do not match the source. Reading a chunk raises if its example cannot
        be read or its length has changed.
    """
    if isinstance(source, SpanSource):
        return _SpanChunkSource(source, max_seq_len, lengths, sequences)
    return ChunkSource(source, max_seq_len, lengths, sequences)


class ChunkSource(PartSource):
    """The source that `split_source` returns.

    Attributes:
      max_seq_len: maximum number of tokens in a chunk.
      lengths: `[M]` int32, the lengths of the chunks, read-only.
      sequences: names of the features that are split; None for all with a leading axis.
    """

    def __init__(
        self,
        source: Source,
        max_seq_len: int,
        lengths: ArrayLike | None = None,
        sequences: Sequence[str] | None = None,
    ):
        self.max_seq_len = check_positive("max_seq_len", max_seq_len)
        super().__init__(source, lengths, sequences)
        self.lengths = chunk_lengths(self._example_lengths, self.max_seq_len)
        self.lengths.setflags(write=False)

    def __reduce__(self) -> tuple[Any, ...]:
        # Workers compute the chunks again, which is cheaper than pickling them.
        source = self._source
        is_row_source = isinstance(source, RowSource)
        sequences = None if is_row_source else self.sequences
        lengths = None if is_row_source else self._example_lengths
        return type(self), (source, self.max_seq_len, lengths, sequences)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({len(self)} chunks of at most {self.max_seq_len} "
            f"of {len(self._example_lengths)} examples)"
        )

    def example_of(self, indices: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Returns the example of each chunk, and the chunk's number in its example.

        Use it to map values of examples to chunks. For example, after
        `examples, _ = source.example_of(range(len(source)))`, the difficulties of the
        chunks for a `Curriculum` are `difficulty[examples]`.

        Args:
          indices: integers of any shape, indices of chunks or -1 for an empty row.

        Returns:
          Two int64 arrays of the same shape: the indices of the examples, and the
          number of each chunk in its example, from 0. Both are -1 for an empty row.

        Raises:
          ValueError: if an index is neither a chunk nor -1.
        """
        indices = np.asarray(indices)
        if indices.dtype.kind not in "iu":
            raise ValueError(
                f"`indices` has dtype {indices.dtype}. Pass integer indices of chunks."
            )
        valid = (indices >= EMPTY_ROW) & (indices < len(self))
        if not valid.all():
            raise ValueError(
                f"`indices` has {indices[~valid][0]}. Pass indices from 0 to "
                f"{len(self) - 1}, or -1 for an empty row."
            )
        empty = indices == EMPTY_ROW
        examples, starts = self._spans(indices.astype(np.int64))
        chunks = starts // self.max_seq_len
        return np.where(empty, EMPTY_ROW, examples), np.where(empty, EMPTY_ROW, chunks)

    def _spans(self, parts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        examples_of_chunks, first_chunks = self._origin
        examples = examples_of_chunks[parts].astype(np.int64)
        return examples, (parts - first_chunks[examples]) * self.max_seq_len

    @functools.cached_property
    def _origin(self) -> tuple[np.ndarray, np.ndarray]:
        """`[M]` the example of each chunk; `[N]` the first chunk of each example."""
        counts = chunk_counts(self._example_lengths, self.max_seq_len)
        # int32 halves the memory of this array, which has an entry for each chunk.
        dtype = np.int32 if len(counts) <= MAX_LENGTH else np.int64
        examples = np.repeat(np.arange(len(counts), dtype=dtype), counts)
        return examples, np.cumsum(counts, dtype=np.int64) - counts

    @functools.cached_property
    def fingerprint(self) -> str:
        """32 hex digits that identify the source and how it is split."""
        how = f"chunks of {self.max_seq_len}\n{contents(self._source)}"
        return digest(how.encode(), self._example_lengths.astype("<i4").data)


class _SpanChunkSource(ChunkSource):
    """Chunks of a source that gathers spans, gathered as spans of its examples."""

    _source: SpanSource
    sequences: tuple[str, ...]

    def collate(
        self,
        rows: np.ndarray,
        bucket: Bucket,
        *,
        pad_value: PadValue = 0,
        truncate: bool = False,
    ) -> Batch:
        """Returns a batch of chunks, like `TokenFile.collate` for examples."""
        rows = check_rows(rows, len(self), bucket)
        lengths = self._lengths_of(rows)
        if truncate:
            lengths = np.minimum(lengths, bucket.tokens_per_row)
        check_row_lengths(lengths, bucket)
        return self._collate_spans(
            rows, np.zeros_like(rows), lengths, bucket, pad_value
        )

    def collate_spans(
        self,
        rows: np.ndarray,
        begins: np.ndarray,
        lengths: np.ndarray,
        bucket: Bucket,
        *,
        pad_value: PadValue = 0,
    ) -> Batch:
        """Returns a batch of spans of chunks, so that chunks can be split again."""
        rows = check_rows(rows, len(self), bucket)
        lengths = span_lengths(rows, begins, lengths, self._lengths_of(rows))
        return self._collate_spans(rows, begins, lengths, bucket, pad_value)

    def _lengths_of(self, rows: np.ndarray) -> np.ndarray:
        """Returns the `[B]` lengths of the chunks in the rows, 0 for empty rows."""
        return np.where(rows == EMPTY_ROW, 0, self.lengths[rows])

    def _collate_spans(
        self,
        rows: np.ndarray,
        begins: np.ndarray,
        lengths: np.ndarray,
        bucket: Bucket,
        pad_value: PadValue,
    ) -> Batch:
        examples, starts = self._spans(rows)
        examples = np.where(rows == EMPTY_ROW, EMPTY_ROW, examples)
        return self._source.collate_spans(
            examples, starts + begins, lengths, bucket, pad_value=pad_value
        )
