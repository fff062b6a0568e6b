"""A source whose examples are spans of token arrays, gathered one batch at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxbucket.base.batch import EMPTY_ROW, Batch
from jaxbucket.base.bucket import Bucket
from jaxbucket.base.checks import MAX_LENGTH
from jaxbucket.base.digest import digest
from jaxbucket.base.notes import Noting
from jaxbucket.base.padding import PadValue, pad_arrays
from jaxbucket.data.collate import (
    check_row_length,
    row_segments,
    token_mask,
    with_segments,
)
from jaxbucket.data.example_spec import ExampleSpec
from jaxbucket.data.source import check_index
from jaxbucket.packing.rows import Packing


class TokenSource:
    """Base class of token files and of views of them.

    Example i is a span of tokens: `lengths[i]` tokens from `_starts[i]` on, counted
    through the tokens of all `files`. Its features that are not sequences are those of
    example `_rows[i]` of the files. Splitting, joining, selecting and concatenating
    examples only changes these three arrays, which `view` does.

    Attributes:
      files: the token files.
      lengths: `[N]` int32, the length of every example, read-only.
      sequences: names of the features with one entry per token.
      fingerprint: 32 hex digits that identify the contents.
    """

    files: Sequence[Any]
    sequences: tuple[str, ...]
    _starts: np.ndarray
    _ends: np.ndarray
    # None if example i is example i of the only file.
    _rows: Any = None

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """The length of every example, `[N]` int32, read-only."""
        lengths = self._ends - self._starts
        if lengths.min() < 1 or lengths.max() > MAX_LENGTH:
            raise ValueError(
                f"{self} has examples of {lengths.min()} to {lengths.max()} tokens, so "
                "it was changed. Write the token file again."
            )
        lengths = lengths.astype(np.int32)
        lengths.setflags(write=False)
        return lengths

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        index = check_index(self, index)
        start, length = int(self._starts[index]), int(self.lengths[index])
        row = index if self._rows is None else int(self._rows[index])
        file, token = _locate(self._token_bases, start)
        _, row = _locate(self._row_bases, row)
        return {
            name: np.array(
                values[token : token + length]
                if name in self.sequences
                else values[row]
            )
            for name, values in self.files[file].arrays.items()
        }

    def view(
        self,
        examples: np.ndarray,
        begins: np.ndarray | int = 0,
        lengths: np.ndarray | None = None,
    ) -> TokenView:
        """Returns a source of spans of the examples of this one.

        Args:
          examples: `[M]` integers, the example of each span.
          begins: `[M]` integers, the first token of each span in its example.
          lengths: `[M]` integers, the lengths of the spans; by default, those of the
            whole examples. A span may extend into the examples that follow in the file.
        """
        rows = examples if self._rows is None else self._rows[examples]
        lengths = self.lengths[examples] if lengths is None else lengths
        starts = self._starts[examples] + begins
        return TokenView(self.files, starts, lengths, rows, examples)

    def adjacent(self) -> np.ndarray:
        """Returns whether each example continues the previous one, `[N - 1]` bool."""
        files = np.searchsorted(self._token_bases, self._starts, side="right")
        ends = self._starts + self.lengths
        return (ends[:-1] == self._starts[1:]) & (files[:-1] == files[1:])

    @functools.cached_property
    def _token_bases(self) -> np.ndarray:
        """The number of tokens before each file, `[F]` int64."""
        return _bases([file.num_tokens for file in self.files])

    @functools.cached_property
    def _row_bases(self) -> np.ndarray:
        """The number of examples before each file, `[F]` int64."""
        return _bases([len(file) for file in self.files])

    def collate(
        self,
        rows: np.ndarray,
        bucket: Bucket,
        *,
        pad_value: PadValue = 0,
        truncate: bool = False,
        truncate_left: bool = False,
    ) -> Batch:
        """Returns the batch that `collate_rows` would return for these examples.

        Args:
          rows: `[B]` integers, the example in each row, -1 for an empty row; or, for
            packed rows, `[B, max_segments]` with -1 after the last example of a row.
          bucket: the shape (B, T).
          pad_value: as for `collate_rows`.
          truncate: whether to keep the first T tokens of longer examples.
          truncate_left: whether to keep their last T tokens.

        Raises:
          ValueError: if an example, or the examples of a row together, are longer than
            T, or if `rows` contains an index that is not an example.
        """
        rows = _checked_rows(rows, len(self), bucket)
        starts = self._starts[rows]
        lengths = np.where(rows == EMPTY_ROW, 0, self.lengths[rows])
        if truncate or truncate_left:
            kept = np.minimum(lengths, bucket.tokens_per_row)
            if truncate_left:
                starts = starts + (lengths - kept)
            lengths = kept
        totals = lengths if rows.ndim == 1 else lengths.sum(axis=1)
        with Noting(f"This is row {totals.argmax()} of the batch."):
            check_row_length(int(totals.max()), bucket.tokens_per_row)
        if rows.ndim == 2:
            return self._packed(rows, starts, lengths, bucket, pad_value)
        filled = np.flatnonzero(rows != EMPTY_ROW)
        mask = token_mask(lengths, bucket)

        def gather(name: str, pad: np.ndarray) -> np.ndarray:
            tokens = self._windows(name, starts, filled, lengths, bucket)
            # With trailing axes, to broadcast with the feature.
            is_padding = ~mask.reshape(*mask.shape, *(1,) * (tokens.ndim - 2))
            np.copyto(tokens, pad, where=is_padding)
            return tokens

        features = self._features(rows, pad_value, gather)
        return with_segments(features, self.sequences[0], mask)

    def _packed(
        self,
        rows: np.ndarray,
        starts: np.ndarray,
        lengths: np.ndarray,
        bucket: Bucket,
        pad_value: PadValue,
    ) -> Batch:
        """Gathers a batch of packed rows, from `[B, S]` starts and lengths."""
        ids, positions = row_segments(lengths, bucket.tokens_per_row)
        mask = ids > 0
        example_starts = np.take_along_axis(starts, np.maximum(ids - 1, 0), axis=1)
        indices = (example_starts + positions)[mask]

        def gather(name: str, pad: np.ndarray) -> np.ndarray:
            values = self.files[0].arrays[name]
            tokens = np.full((*mask.shape, *values.shape[1:]), pad)
            tokens[mask] = self._take(name, self._token_bases, indices)
            return tokens

        features = self._features(rows, pad_value, gather)
        name = self.sequences[0]
        return Batch(features, {name: ids}, {name: positions})

    def _features(
        self,
        rows: np.ndarray,
        pad_value: PadValue,
        gather: Callable[[str, np.ndarray], np.ndarray],
    ) -> dict[str, np.ndarray]:
        """Gathers sequences with `gather`, and all other features by `rows`."""
        arrays, sequences = self.files[0].arrays, self.sequences
        pads = pad_arrays(pad_value, {name: arrays[name].dtype for name in sequences})
        return {
            name: gather(name, pads[name])
            if name in sequences
            else self._examples(name, rows)
            for name in arrays
        }

    def _examples(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Returns the values of the examples in `rows`, `[*rows, ...]`; 0 if empty."""
        values = self.files[0].arrays[name]
        gathered = np.zeros((*rows.shape, *values.shape[1:]), values.dtype)
        filled = rows != EMPTY_ROW
        chosen = rows[filled] if self._rows is None else self._rows[rows[filled]]
        gathered[filled] = self._take(name, self._row_bases, chosen)
        return gathered

    def _take(self, name: str, bases: np.ndarray, indices: np.ndarray) -> np.ndarray:
        """Returns the values of a feature at `[n]` indices through all files."""
        first = self.files[0].arrays[name]
        if len(self.files) == 1:
            return first[indices]
        taken = np.empty((len(indices), *first.shape[1:]), first.dtype)
        for file, chosen in _by_file(bases, indices):
            values = self.files[file].arrays[name]
            taken[chosen] = values[indices[chosen] - bases[file]]
        return taken

    def _windows(
        self,
        name: str,
        starts: np.ndarray,
        filled: np.ndarray,
        lengths: np.ndarray,
        bucket: Bucket,
    ) -> np.ndarray:
        """Returns the T tokens from each start in the filled rows, `[B, T, ...]`.

        Values after the length of a row are arbitrary.
        """
        values = self.files[0].arrays[name]
        shape = (bucket.batch_size, bucket.tokens_per_row, *values.shape[1:])
        if len(self.files) == 1 and len(filled) == bucket.batch_size:
            windows = _sliding(values, bucket.tokens_per_row)
            if starts.max() < len(windows):
                return windows[starts]
        tokens = np.empty(shape, values.dtype)
        for file, chosen in _by_file(self._token_bases, starts[filled]):
            values = self.files[file].arrays[name]
            windows = _sliding(values, bucket.tokens_per_row)
            rows = filled[chosen]
            first = starts[rows] - self._token_bases[file]
            inside = first < len(windows)
            tokens[rows[inside]] = windows[first[inside]]
            # The few spans that are close to the end of the file.
            for row, start in zip(rows[~inside], first[~inside], strict=True):
                tokens[row, : lengths[row]] = values[start : start + lengths[row]]
        return tokens


class TokenView(TokenSource):
    """Spans of the tokens of one or several token files.

    Attributes:
      files, lengths, sequences, fingerprint: as in `TokenSource`.
      examples: `[N]` int64, the example of the viewed source that each example is a
        part of, or starts with.
      packing: the rows that the examples fill, after `concat_then_split`.
    """

    packing: Packing | None = None
    _rows: np.ndarray

    def __init__(
        self,
        files: Sequence[Any],
        starts: np.ndarray,
        lengths: np.ndarray,
        rows: np.ndarray,
        examples: np.ndarray,
    ):
        self.files, self.sequences = tuple(files), files[0].sequences
        self._starts, self._ends, self._rows = starts, starts + lengths, rows
        self.examples = examples

    def __repr__(self) -> str:
        return f"TokenView({len(self)} examples of {list(self.files)})"

    @functools.cached_property
    def fingerprint(self) -> str:
        """32 hex digits that identify the files and the spans."""
        files = "\n".join(file.fingerprint for file in self.files)
        spans = (self._starts, self.lengths, self._rows)
        return digest(files.encode(), *(x.astype("<i8").data for x in spans))


def concatenated(sources: Sequence[TokenSource]) -> TokenView:
    """Returns the examples of all sources, one source after another."""
    spec = ExampleSpec(sources[0][0], sources[0].sequences)
    for number, source in enumerate(sources):
        with Noting(f"This is `sources[{number}]`."):
            spec.match(source[0])
            if source.sequences != sources[0].sequences:
                raise ValueError(
                    f"`sources` differ: the sequences are {source.sequences}, and "
                    f"those of the first source {sources[0].sequences}."
                )
    files = [file for source in sources for file in source.files]
    tokens = _bases([sum(x.num_tokens for x in source.files) for source in sources])
    rows = _bases([sum(map(len, source.files)) for source in sources])
    views = [source.view(np.arange(len(source))) for source in sources]
    starts = [view._starts + base for view, base in zip(views, tokens, strict=True)]
    chosen = [view._rows + base for view, base in zip(views, rows, strict=True)]
    lengths = np.concatenate([view.lengths for view in views])
    examples = np.arange(len(lengths))
    return TokenView(
        files, np.concatenate(starts), lengths, np.concatenate(chosen), examples
    )


def _bases(sizes: Sequence[int]) -> np.ndarray:
    return np.cumsum([0, *sizes[:-1]], dtype=np.int64)


def _locate(bases: np.ndarray, index: int) -> tuple[int, int]:
    """Returns the file of an index through all files, and the index in this file."""
    file = int(np.searchsorted(bases, index, side="right")) - 1
    return file, index - int(bases[file])


def _by_file(bases: np.ndarray, indices: np.ndarray) -> Iterator[tuple[int, Any]]:
    """Yields each file that some of the `[n]` indices are in, and which these are."""
    if len(bases) == 1:
        yield 0, slice(None)
        return
    files = np.searchsorted(bases, indices, side="right") - 1
    for file in np.unique(files).tolist():
        yield file, files == file


def _sliding(values: np.ndarray, size: int) -> np.ndarray:
    """Returns a view `[n - size + 1, size, ...]`, empty if there are fewer values."""
    return np.lib.stride_tricks.as_strided(
        values,
        (max(0, len(values) - size + 1), size, *values.shape[1:]),
        (values.strides[0], *values.strides),
        writeable=False,
    )


def _checked_rows(rows: Any, num_examples: int, bucket: Bucket) -> np.ndarray:
    """Returns the rows of a batch as int64, which cannot overflow in sums."""
    rows = np.asarray(rows)
    is_valid = rows.dtype.kind in "iu" and rows.ndim in (1, 2)
    if is_valid and len(rows) == bucket.batch_size:
        first, last = rows.min(initial=0), rows.max(initial=0)
        # Empty entries are the last ones of a packed row.
        is_dense = rows.ndim == 1 or not np.any((rows[:, :-1] < 0) & (rows[:, 1:] >= 0))
        if first >= EMPTY_ROW and last < num_examples and is_dense:
            return rows.astype(np.int64, copy=False)
    raise ValueError(
        f"`rows={rows}` must be {bucket.batch_size} integers below {num_examples}, -1 "
        "for an empty row; or rows of integers with -1 after the last example."
    )
