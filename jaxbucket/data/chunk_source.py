"""A source whose examples that are too long are cut into chunks, as one of chunks."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.batch import EMPTY_ROW, Batch
from jaxbucket.base.buckets import Bucket
from jaxbucket.base.checks import MAX_LENGTH, check_lengths, check_positive
from jaxbucket.base.digest import digest
from jaxbucket.base.padding import PadValue
from jaxbucket.data.collate import check_rows, fit_lengths, span_lengths
from jaxbucket.data.source import (
    RowSource,
    Source,
    SpanSource,
    check_sequences,
    contents,
    read_to_cut,
    refuse_changed,
)
from jaxbucket.plan.chunks import chunk_counts, chunk_lengths

# Whose example it is that a message names: there are two sources.
_BEFORE = ", before it was split,"


def split_source(
    source: Source,
    max_seq_len: int,
    *,
    lengths: ArrayLike | None = None,
    sequences: Sequence[str] | None = None,
) -> ChunkSource:
    """Returns the source with every example that is too long cut into chunks.

    An index of it is a chunk; those of an example follow each other. A chunk has its
    part of the sequences, and everything else of its example as it is. No token is
    lost, and none is in two chunks. Positions count from 0 in each of them.

    It gathers rows at once if the source does, as token files do. Of another source,
    reading a chunk reads its whole example.

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
      source: examples by index, dicts of arrays.
      max_seq_len: what a chunk has at most: that of the plan.
      lengths: `[N]` integers, those of the examples, from `measure_lengths`. Not
        needed of a source that knows them, such as a token file.
      sequences: the features that are cut, by default all with a leading axis.

    Raises:
      ValueError: if `max_seq_len` is not positive, or the lengths or the sequences are
        missing or not those of the source. And from a chunk, if its example cannot be
        read or is not as long as it was measured.
    """
    if isinstance(source, SpanSource):
        return _GatheredChunks(source, max_seq_len, lengths, sequences)
    return ChunkSource(source, max_seq_len, lengths, sequences)


class ChunkSource:
    """What `split_source` returns.

    Attributes:
      max_seq_len: what a chunk has at most.
      lengths: `[M]` int32, those of the chunks; not to be written to.
      sequences: the features that are cut; None for all with a leading axis.
    """

    def __init__(
        self,
        source: Source,
        max_seq_len: int,
        lengths: ArrayLike | None = None,
        sequences: Sequence[str] | None = None,
    ):
        self.max_seq_len = check_positive("max_seq_len", max_seq_len)
        self._source = source
        self._sequences = check_sequences(source, sequences)
        # A copy: what is derived from it later must not change.
        self._example_lengths = _known_lengths(source, lengths).astype(np.int32)
        self.lengths = chunk_lengths(self._example_lengths, self.max_seq_len)
        self.lengths.setflags(write=False)

    def __reduce__(self) -> tuple[Any, ...]:
        # Chunks are found anew by a worker: they would be several times as much.
        lengths = None if isinstance(self._source, RowSource) else self._example_lengths
        return type(self), (self._source, self.max_seq_len, lengths, self._sequences)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({len(self)} chunks of at most {self.max_seq_len} "
            f"of {len(self._example_lengths)} examples)"
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        example, chunk = (int(x) for x in self.example_of(self._checked(index)))
        measured = int(self._example_lengths[example])
        arrays, names = read_to_cut(
            self._source, example, measured, self._sequences, _BEFORE
        )
        start = chunk * self.max_seq_len
        return {
            name: value[start : start + self.max_seq_len] if name in names else value
            for name, value in arrays.items()
        }

    @property
    def sequences(self) -> Sequence[str] | None:
        return self._sequences

    def _checked(self, index: int) -> int:
        index = operator.index(index)
        if not 0 <= index < len(self):
            raise IndexError(f"`index={index}` must be from 0 to {len(self) - 1}.")
        return index

    def example_of(self, indices: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Returns which example each chunk is of, and which of its chunks it is.

        What belongs to examples goes to their chunks by it: with
        `examples, _ = source.example_of(range(len(source)))` difficulties for a
        `Curriculum` are `difficulty[examples]`.

        Args:
          indices: integers of any shape; -1, an empty row, stays -1 in both.

        Returns:
          The examples, and the numbers of their chunks from 0 on, int64.

        Raises:
          ValueError: if one of them is no chunk.
        """
        indices = np.asarray(indices)
        if indices.dtype.kind not in "iu":
            raise ValueError(
                f"`indices` has dtype {indices.dtype}: give the integers of chunks."
            )
        known = (indices >= EMPTY_ROW) & (indices < len(self))
        if not known.all():
            raise ValueError(
                f"`indices` has {indices[~known][0]}: chunks are from 0 to "
                f"{len(self) - 1}, and -1 is an empty row."
            )
        empty = indices == EMPTY_ROW
        examples, chunks = self._origin_of(indices.astype(np.int64))
        return np.where(empty, EMPTY_ROW, examples), np.where(empty, EMPTY_ROW, chunks)

    def _origin_of(self, chunks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Example and number of each chunk, int64."""
        own, first_chunks = self._origin
        examples = own[chunks].astype(np.int64)
        return examples, chunks - first_chunks[examples]

    @functools.cached_property
    def _origin(self) -> tuple[np.ndarray, np.ndarray]:
        """`[M]`, the example of each chunk; `[N]` int64, the first chunk of each."""
        counts = chunk_counts(self._example_lengths, self.max_seq_len)
        # Half as much as int64, and there is one for each chunk.
        dtype = np.int32 if len(counts) <= MAX_LENGTH else np.int64
        examples = np.repeat(np.arange(len(counts), dtype=dtype), counts)
        return examples, np.cumsum(counts, dtype=np.int64) - counts

    @functools.cached_property
    def fingerprint(self) -> str:
        """32 hex digits that name the source, as `contents` does, and how it is cut."""
        how = f"chunks of {self.max_seq_len}\n{contents(self._source)}"
        return digest(how.encode(), self._example_lengths.astype("<i4").data)


class _GatheredChunks(ChunkSource):
    """Chunks of a source that gathers spans, whose rows are spans of its own."""

    _source: SpanSource

    @property
    def sequences(self) -> tuple[str, ...]:
        return self._source.sequences

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        index = self._checked(index)
        # Without the rest of its example, which may be long.
        batch = self.collate(np.array([index]), Bucket(1, int(self.lengths[index])))
        return {name: value[0, ...] for name, value in batch.features.items()}

    def collate(
        self,
        rows: np.ndarray,
        bucket: Bucket,
        *,
        pad_value: PadValue = 0,
        truncate: bool = False,
    ) -> Batch:
        """Returns the batch of some chunks, as `TokenFile.collate` does of examples."""
        rows = check_rows(rows, len(self), bucket)
        lengths = fit_lengths(self._lengths_of(rows), bucket, truncate)
        return self._gathered(rows, np.zeros_like(rows), lengths, bucket, pad_value)

    def collate_spans(
        self,
        rows: np.ndarray,
        begins: np.ndarray,
        lengths: np.ndarray,
        bucket: Bucket,
        *,
        pad_value: PadValue = 0,
    ) -> Batch:
        """Returns the batch of parts of chunks, which may be cut again."""
        rows = check_rows(rows, len(self), bucket)
        lengths = span_lengths(rows, begins, lengths, self._lengths_of(rows))
        return self._gathered(rows, begins, lengths, bucket, pad_value)

    def _lengths_of(self, rows: np.ndarray) -> np.ndarray:
        """`[B]`: those of the chunks in the rows; 0 of an empty one."""
        return np.where(rows == EMPTY_ROW, 0, self.lengths[rows])

    def _gathered(
        self,
        rows: np.ndarray,
        begins: np.ndarray,
        lengths: np.ndarray,
        bucket: Bucket,
        pad_value: PadValue,
    ) -> Batch:
        examples, chunks = self._origin_of(rows)
        begins = begins + chunks * self.max_seq_len
        examples = np.where(rows == EMPTY_ROW, EMPTY_ROW, examples)
        return self._source.collate_spans(
            examples, begins, lengths, bucket, pad_value=pad_value
        )


def _known_lengths(source: Source, lengths: ArrayLike | None) -> np.ndarray:
    """`[N]`: those of the examples, as they were given or as the source has them."""
    own = source.lengths if isinstance(source, RowSource | ChunkSource) else None
    given = own if lengths is None else lengths
    if given is None:
        raise ValueError(
            "`lengths` are missing: the source cannot say how long its examples are. "
            "Pass `lengths=jb.measure_lengths(source)`."
        )
    found = check_lengths(given)
    if len(found) != len(source):
        raise ValueError(
            f"`lengths` has {len(found)} entries, but `source` has {len(source)} "
            "examples. Pass the lengths measured of it, before it was split."
        )
    if own is not None and np.any(found != own):
        index = int(np.argmax(found != own))
        refuse_changed(index, int(own[index]), int(found[index]))
    return found
