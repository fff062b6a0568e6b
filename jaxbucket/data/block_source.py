"""A source that joins consecutive examples into blocks of up to T tokens."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.batch import Batch
from jaxbucket.base.bucket import Bucket
from jaxbucket.base.checks import MAX_LENGTH, check_positive
from jaxbucket.base.digest import digest
from jaxbucket.base.padding import PadValue
from jaxbucket.data.derived_source import DerivedSource
from jaxbucket.data.example import matching_arrays
from jaxbucket.data.source import Source, check_index, contents
from jaxbucket.data.token_file import TokenFile


def join_examples(
    source: Source,
    max_seq_len: int,
    *,
    lengths: ArrayLike | None = None,
    documents: ArrayLike | None = None,
    sequences: Sequence[str] | None = None,
) -> BlockSource:
    """Joins consecutive examples, such as sentences, into blocks of up to T tokens.

    Each element of the returned source is a block of whole examples in source order: as
    many as fit, starting where the previous block ends. Every example is in exactly one
    block, and blocks are the same in every epoch. With `documents`, no block has
    examples of two documents. These are the block modes "complete" and "complete_doc"
    of fairseq.

    A block is a single example for schedules and models: its tokens attend to each
    other, and its positions count from 0. An example longer than T is a block of its
    own. As any other example that is too long, the plan's `overlong` refuses, drops or
    truncates it, or `split_source` splits it.

    From a token file, batches of blocks are gathered without a loop over examples. From
    other sources, examples are read one at a time. Several token files are best joined
    first and then concatenated.

    Example:
      >>> sentences = [{"x": [1, 2]}, {"x": [3]}, {"x": [4, 5]}, {"x": [6]}]
      >>> blocks = join_examples(sentences, 4, lengths=[2, 1, 2, 1])
      >>> [block["x"].tolist() for block in blocks]
      [[1, 2, 3], [4, 5, 6]]
      >>> blocks = join_examples(
      ...     sentences, 4, lengths=[2, 1, 2, 1], documents=[0, 0, 0, 1]
      ... )
      >>> [block["x"].tolist() for block in blocks]
      [[1, 2, 3], [4, 5], [6]]
      >>> blocks.lengths, blocks.example_splits
      (array([3, 2, 1], dtype=int32), array([0, 2, 3, 4]))

    Args:
      source: random-access source of examples, which are dicts of arrays.
      max_seq_len: maximum number of tokens T in a block of several examples.
      lengths: `[N]` integers, the lengths of the examples, from `measure_lengths`. Not
        needed if the source provides them, as a token file does.
      documents: `[N]` integers, the document of each example. A document ends where the
        next example has a different number. By default all are one document.
      sequences: names of the features that are joined. By default all features with a
        leading axis.

    Returns:
      The source of blocks.

    Raises:
      ValueError: if `max_seq_len` is not positive; if `lengths`, `documents` or
        `sequences` are missing or do not match the source; or if examples have a
        feature that is not a sequence, because a block would have several values of it.
        Reading a block raises if an example cannot be read, its length has changed, or
        its features differ from those of the first example of the block.
    """
    kind = _FileBlockSource if isinstance(source, TokenFile) else BlockSource
    borders = None if documents is None else _borders(documents, len(source))
    return kind(source, max_seq_len, lengths, borders, sequences)


class BlockSource(DerivedSource):
    """The source that `join_examples` returns.

    Attributes:
      max_seq_len: maximum number of tokens in a block of several examples.
      lengths: `[M]` int32, the lengths of the blocks, read-only.
      example_splits: `[M + 1]` int64; block b joins the examples `example_splits[b]` to
        `example_splits[b + 1] - 1`. Read-only.
      sequences: names of the features that are joined; None for all with a leading
        axis.
    """

    _change = "joined"

    def __init__(
        self,
        source: Source,
        max_seq_len: int,
        lengths: ArrayLike | None,
        borders: np.ndarray | None,
        sequences: Sequence[str] | None,
    ):
        self.max_seq_len = check_positive("max_seq_len", max_seq_len)
        super().__init__(source, lengths, sequences)
        self._borders = borders
        self.example_splits = _splits(self._example_lengths, self.max_seq_len, borders)
        starts = self.example_splits[:-1]
        self.lengths = np.add.reduceat(self._example_lengths, starts, dtype=np.int32)
        for array in (self.example_splits, self.lengths):
            array.setflags(write=False)
        # Examples that cannot be joined are refused before the first step.
        self._read(0)

    def __repr__(self) -> str:
        return (
            f"BlockSource({len(self)} blocks of at most {self.max_seq_len} of "
            f"{len(self._example_lengths)} examples)"
        )

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        index = check_index(self, index)
        first, last = self.example_splits[index : index + 2].tolist()
        template, names = self._read(first)
        examples, axes = [template], {name: names[:1] for name in names}
        for example in range(first + 1, last):
            arrays, _ = self._read(example)
            try:
                matching_arrays(arrays, template, axes, example)
            except ValueError as error:
                raise ValueError(
                    f"`source[{example}]` cannot be joined with `source[{first}]`: "
                    f"{error}"
                ) from None
            examples.append(arrays)
        return {name: np.concatenate([x[name] for x in examples]) for name in names}

    def _read(self, index: int) -> tuple[dict[str, np.ndarray], list[str]]:
        arrays, names = super()._read(index)
        if others := sorted(arrays.keys() - set(names)):
            raise ValueError(
                f"`source[{index}]` has the features {others}, which are not sequences "
                "and would have several values in a block. Remove them, or put the "
                "examples into rows by `jb.packing.pack`, which keeps all values."
            )
        return arrays, names

    @functools.cached_property
    def fingerprint(self) -> str:
        """32 hex digits that identify the source and how it is joined."""
        parts = f"{contents(self._source)}\n{self.max_seq_len}".encode()
        return digest(parts, self.example_splits.astype("<i8").data)


class _FileBlockSource(BlockSource):
    """Blocks of a token file, in which the examples of a block are adjacent."""

    gathers_packed_rows: Literal[True] = True
    sequences: tuple[str, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        # Workers map the file and compute the blocks again.
        return type(self), (self._source, self.max_seq_len, None, self._borders, None)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return self._blocks[check_index(self, index)]

    def collate(
        self,
        rows: np.ndarray,
        bucket: Bucket,
        *,
        pad_value: PadValue = 0,
        truncate: bool = False,
    ) -> Batch:
        """Returns a batch of blocks, like `TokenFile.collate` for examples."""
        return self._blocks.collate(
            rows, bucket, pad_value=pad_value, truncate=truncate
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
        """Returns a batch of spans of blocks, so that they can be split."""
        return self._blocks.collate_spans(
            rows, begins, lengths, bucket, pad_value=pad_value
        )

    @functools.cached_property
    def _blocks(self) -> TokenFile:
        file = cast(TokenFile, self._source)
        return file._with_joined_examples(self.example_splits)


def _borders(documents: ArrayLike, num_examples: int) -> np.ndarray:
    """Returns the first example after each document, `[D]` int64."""
    numbers = np.asarray(documents)
    if numbers.shape != (num_examples,) or numbers.dtype.kind not in "iu":
        raise ValueError(
            f"`documents` is {numbers.dtype}{list(numbers.shape)}. Pass an integer for "
            f"each of the {num_examples} examples, the number of its document."
        )
    return np.append(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1, num_examples)


def _splits(
    lengths: np.ndarray, max_seq_len: int, borders: np.ndarray | None
) -> np.ndarray:
    """Returns the first example of each block, and N: `[M + 1]` int64.

    Args:
      lengths: `[N]` integers.
      max_seq_len: maximum number of tokens in a block of several examples.
      borders: the first example after each document; None for a single document.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    limits = ends - lengths + min(max_seq_len, MAX_LENGTH)
    # For each example, where the block that starts with it ends.
    block_ends = np.searchsorted(ends, limits, side="right")
    examples = np.arange(len(lengths))
    block_ends = np.maximum(block_ends, examples + 1)
    if borders is not None:
        document_ends = borders[np.searchsorted(borders, examples, side="right")]
        block_ends = np.minimum(block_ends, document_ends)
    # A memoryview reads single items several times as fast as an array.
    return np.fromiter(_follow(block_ends.data), np.int64)


def _follow(block_ends: memoryview) -> Iterator[int]:
    """Yields 0, the end of the block that starts there, and so on."""
    example = 0
    while example < len(block_ends):
        yield example
        example = block_ends[example]
    yield example
