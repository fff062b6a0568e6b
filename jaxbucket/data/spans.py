"""Sources whose elements are spans of examples: split, joined, or concatenated."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.checks import MAX_LENGTH, check_lengths, check_positive, check_seed
from jaxbucket.base.digest import digest
from jaxbucket.base.notes import Noting
from jaxbucket.base.permutation import fold, permute
from jaxbucket.data.example import listed_names
from jaxbucket.data.example_spec import ExampleSpec
from jaxbucket.data.source import (
    Source,
    check_index,
    check_length,
    check_measured,
    contents,
)
from jaxbucket.data.token_source import TokenSource, TokenView
from jaxbucket.packing.rows import Packing
from jaxbucket.plan.chunks import chunk_lengths

# Separates this permutation from those of schedules with the same seed.
_CONCAT = 0xC0A7


class SpanSource:
    """A source whose elements are spans of the examples of any other source.

    Attributes:
      lengths: `[M]` int32, the lengths of the elements, read-only.
      examples: `[M]` int64, the example that each element is a part of, or starts with.
      sequences: names of the sequence features; None for all with a leading axis.
      packing: the rows that the elements fill, after `concat_then_split`.
    """

    packing: Packing | None = None

    def __init__(
        self,
        source: Source,
        known: np.ndarray,
        sequences: Sequence[str] | None,
        spans: tuple[np.ndarray, np.ndarray, np.ndarray],
        counts: np.ndarray | None = None,
    ):
        """Makes a source.

        Args:
          source: random-access source of N examples.
          known: `[N]` integers, the lengths of the examples.
          sequences: names of the sequence features; None for all with a leading axis.
          spans: `[M]` integers each: the example of each element, its first token, and
            its number of tokens.
          counts: `[M]` integers, the number of whole examples that are joined in each
            element; None if each is a span of one example.
        """
        self._source, self._known, self.sequences = source, known, sequences
        self.examples, self._starts, lengths = spans
        self.lengths = lengths.astype(np.int32)
        self.lengths.setflags(write=False)
        self._counts = counts
        if counts is not None:
            # Examples that cannot be joined are refused before the first step.
            self._read(0)

    def __repr__(self) -> str:
        return f"SpanSource({len(self)} spans of {len(self._known)} examples)"

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        index = check_index(self, index)
        first = int(self.examples[index])
        spec = self._read(first)
        arrays, names = spec.arrays, spec.axes
        if self._counts is None:
            start = int(self._starts[index])
            span = slice(start, start + int(self.lengths[index]))
            return {x: y[span] if x in names else y for x, y in arrays.items()}
        parts = [arrays]
        for number in range(first + 1, first + int(self._counts[index])):
            others = self._read(number)
            with Noting(f"This is `source[{number}]`, joined with `source[{first}]`."):
                parts.append(spec.match(others.arrays))
        return {name: np.concatenate([x[name] for x in parts]) for name in names}

    def _read(self, index: int) -> ExampleSpec:
        """Returns an entire example, with its sequences."""
        done = "split" if self._counts is None else "joined"
        with Noting(f"This is `source[{index}]`, before it was {done}."):
            spec = ExampleSpec(self._source[index], self.sequences)
            (length,) = spec.lengths().values()
            check_length(index, length, int(self._known[index]))
            if self._counts is not None:
                _check_only_sequences(sorted(spec.arrays.keys() - spec.axes.keys()))
        return spec

    @functools.cached_property
    def fingerprint(self) -> str:
        """32 hex digits that identify the source and the spans."""
        arrays = [self.examples, self._starts, self.lengths]
        spans = (x.astype("<i8").data for x in arrays)
        return digest(contents(self._source).encode(), *spans)


# What the functions of this module return: a view, if the source is a token file.
Spans: TypeAlias = SpanSource | TokenView


def split_source(
    source: Source,
    max_seq_len: int,
    *,
    lengths: ArrayLike | None = None,
    sequences: Sequence[str] | None = None,
) -> Spans:
    """Splits every example longer than `max_seq_len` into chunks.

    Each element of the returned source is a chunk, and the chunks of an example are
    consecutive. A chunk has its span of each sequence feature, and all other features
    of its example unchanged. Every token is in exactly one chunk. Positions restart at
    0 in each chunk.

    A token file is split without reading it. For all other sources, reading a chunk
    reads its whole example.

    Example:
      >>> examples = [{"x": [1, 2], "name": 7}, {"x": [3, 4, 5, 6, 7], "name": 8}]
      >>> source = split_source(examples, 2, lengths=[2, 5])
      >>> source.lengths, source.examples
      (array([2, 2, 2, 1], dtype=int32), array([0, 1, 1, 1]))
      >>> source[2]
      {'x': array([5, 6]), 'name': array(8)}

    Args:
      source: random-access source of examples, which are dicts of arrays.
      max_seq_len: maximum number of tokens in a chunk, the plan's `max_seq_len`.
      lengths: `[N]` integers, the lengths of the examples, from `measure_lengths`. Not
        needed if the source provides them, as a token file does.
      sequences: names of the features that are split. By default all features with a
        leading axis.

    Returns:
      The source of chunks, with their `lengths` and the example of each in `examples`.
      For example, the difficulties of chunks for a `Curriculum` are
      `difficulty[source.examples]`.

    Raises:
      ValueError: if `max_seq_len` is not positive, or `lengths` or `sequences` are
        missing or do not match the source. Reading a chunk raises if its example cannot
        be read or its length has changed.
    """
    longest = min(check_positive("max_seq_len", max_seq_len), MAX_LENGTH)
    known = _known_lengths(source, lengths)
    chunks = chunk_lengths(known, longest)
    counts = -(-known // longest)
    examples = np.repeat(np.arange(len(known)), counts)
    first_chunks = np.cumsum(counts, dtype=np.int64) - counts
    starts = (np.arange(len(chunks)) - first_chunks[examples]) * longest
    return _spans(source, known, sequences, (examples, starts, chunks))


def concat_then_split(
    source: Source,
    max_seq_len: int,
    *,
    lengths: ArrayLike | None = None,
    seed: int = 0,
    sequences: Sequence[str] | None = None,
) -> Spans:
    """Concatenates shuffled examples and splits them into rows of T tokens.

    Each element of the returned source is a part of an example. Its `packing` assigns
    the parts to rows, of which all but the last are full. Every token is in exactly one
    row. The points at which examples are split depend only on the seed; parts of equal
    length are randomly permuted among their positions in every epoch.

    Attention that uses the segment ids keeps the parts of a row apart. To attend across
    parts, as some pretraining does, ignore the segment ids and use `jnp.arange(T)` as
    positions.

    Example:
      >>> examples = [{"x": [1] * 5}, {"x": [2] * 4}, {"x": [3] * 3}]
      >>> source = concat_then_split(examples, 4, lengths=[5, 4, 3])
      >>> source.packing
      Packing(4 examples in 3 rows of 4, fill 100.0%)
      >>> [source[part]["x"].tolist() for part in range(len(source))]
      [[1, 1, 1, 1], [1], [3, 3, 3], [2, 2, 2, 2]]

    Args:
      source: random-access source of examples.
      max_seq_len: number of tokens T in every row.
      lengths: as for `split_source`.
      sequences: as for `split_source`.
      seed: seed of the order in which examples are concatenated.

    Returns:
      The source of parts, with the rows that they fill as `packing`.

    Raises:
      ValueError: if `max_seq_len` is not positive, or `lengths` or `sequences` do not
        match the source. Reading a part raises if its example cannot be read or its
        length has changed.
    """
    seq_len = check_positive("max_seq_len", max_seq_len)
    known = _known_lengths(source, lengths)
    order = permute(np.arange(len(known)), len(known), fold(check_seed(seed), _CONCAT))
    ends = np.cumsum(known[order], dtype=np.int64)
    total = int(ends[-1])
    rows = np.arange(0, total, seq_len)
    starts = np.unique(np.concatenate([rows, ends[:-1]]))
    parts = np.diff(starts, append=total)
    ranks = np.searchsorted(ends, starts, side="right")
    examples = order[ranks]
    begins = starts - (ends[ranks] - known[examples])
    result = _spans(source, known, sequences, (examples, begins, parts))
    splits = np.append(np.searchsorted(starts, rows), len(starts))
    most = int(np.diff(splits).max())
    result.packing = Packing((seq_len,), result.lengths, splits, most)
    return result


def join_examples(
    source: Source,
    max_seq_len: int,
    *,
    lengths: ArrayLike | None = None,
    documents: ArrayLike | None = None,
    sequences: Sequence[str] | None = None,
) -> Spans:
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

    Examples of a token file are joined without reading them, unless a block would have
    examples of two files or in another order. Otherwise examples are read one at a
    time.

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
      >>> blocks.lengths, blocks.examples
      (array([3, 2, 1], dtype=int32), array([0, 2, 3]))

    Args:
      source: random-access source of examples, which are dicts of arrays.
      max_seq_len: maximum number of tokens T in a block of several examples.
      lengths: as for `split_source`.
      sequences: as for `split_source`.
      documents: `[N]` integers, the document of each example. A document ends where the
        next example has a different number. By default all are one document.

    Returns:
      The source of blocks, with their `lengths` and the first example of each in
      `examples`.

    Raises:
      ValueError: if `max_seq_len` is not positive; if `lengths`, `documents` or
        `sequences` are missing or do not match the source; or if examples have a
        feature that is not a sequence, because a block would have several values of it.
        Reading a block raises if an example cannot be read, its length has changed, or
        its features differ from those of the first example of the block.
    """
    longest = min(check_positive("max_seq_len", max_seq_len), MAX_LENGTH)
    known = _known_lengths(source, lengths)
    splits = _block_splits(known, longest, _document_ends(documents, len(source)))
    firsts, counts = splits[:-1], np.diff(splits)
    blocks = np.add.reduceat(known, firsts, dtype=np.int64)
    if isinstance(source, TokenSource):
        _check_only_sequences(sorted(source[0].keys() - set(source.sequences)))
        may_break = np.zeros(len(known), bool)
        may_break[firsts] = True
        if (source.adjacent() | may_break[1:]).all():
            counts = None
    return _spans(source, known, sequences, (firsts, firsts * 0, blocks), counts)


def _spans(
    source: Source,
    known: np.ndarray,
    sequences: Sequence[str] | None,
    spans: tuple[np.ndarray, np.ndarray, np.ndarray],
    counts: np.ndarray | None = None,
) -> Spans:
    """Returns a view of a token file, or a `SpanSource`, which has these arguments."""
    names = check_sequences(source, sequences)
    if counts is None and isinstance(source, TokenSource):
        return source.view(*spans)
    return SpanSource(source, known, names, spans, counts)


def check_sequences(
    source: Source, sequences: Sequence[str] | None
) -> Sequence[str] | None:
    """Returns the sequence features of a source; None for all with a leading axis."""
    names = None if sequences is None else listed_names(sequences)
    declared = source.sequences if isinstance(source, Spans | TokenSource) else None
    if declared is not None and names not in (None, list(declared)):
        raise ValueError(
            f"`sequences={names}`, but the source has {list(declared)}. Remove "
            "`sequences`, or write the source with these sequences."
        )
    return names if declared is None else declared


def _known_lengths(source: Source, lengths: ArrayLike | None) -> np.ndarray:
    """Returns the `[N]` lengths of examples, as passed or as declared by the source."""
    declared = source.lengths if isinstance(source, Spans | TokenSource) else None
    given = declared if lengths is None else lengths
    known = np.zeros(0, np.int32)
    if given is not None:
        known = check_lengths(given).astype(np.int32)
    if len(known) != len(source):
        raise ValueError(
            f"`lengths` has {len(known)} entries, but `source` has {len(source)} "
            "examples. Pass `lengths=jb.measure_lengths(source)`."
        )
    if declared is not None:
        check_measured(declared, known)
    return known


def _check_only_sequences(others: Sequence[str]) -> None:
    """Raises a ValueError if examples to be joined have other features."""
    if others:
        raise ValueError(
            f"`source` has {others}, of which a block would have several values. "
            "Remove them, or pack rows (`jb.packing.pack`)."
        )


def _document_ends(documents: ArrayLike | None, num_examples: int) -> np.ndarray:
    """Returns for each example where its document ends, `[N]` int64."""
    if documents is None:
        return np.full(num_examples, num_examples)
    numbers = np.asarray(documents)
    if numbers.shape != (num_examples,) or numbers.dtype.kind not in "iu":
        raise ValueError(
            f"`documents` is {numbers.dtype}{list(numbers.shape)}, not a number for "
            f"each of the {num_examples} examples."
        )
    ends = np.append(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1, num_examples)
    return ends[np.searchsorted(ends, np.arange(num_examples), side="right")]


def _block_splits(
    lengths: np.ndarray, max_seq_len: int, document_ends: np.ndarray
) -> np.ndarray:
    """Returns the first example of each block, and N: `[M + 1]` int64."""
    ends = np.cumsum(lengths, dtype=np.int64)
    # For each example, where the block that starts with it ends.
    block_ends = np.searchsorted(ends, ends - lengths + max_seq_len, side="right")
    block_ends = np.maximum(block_ends, np.arange(1, len(lengths) + 1))
    # A memoryview reads single items several times as fast as an array.
    return np.fromiter(_follow(np.minimum(block_ends, document_ends).data), np.int64)


def _follow(block_ends: memoryview) -> Iterator[int]:
    """Yields 0, the end of the block that starts there, and so on."""
    example = 0
    while example < len(block_ends):
        yield example
        example = block_ends[example]
    yield example
