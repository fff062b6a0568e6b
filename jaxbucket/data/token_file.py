"""Concatenated examples in memory-mapped arrays, gathered one batch at a time.

A token file is a folder of plain `.npy` files, which numpy can read without this
library: one file for each feature, and `offsets.npy` with the start of each example.
`index.json` describes these files.
"""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from jaxbucket.base.batch import EMPTY_ROW, Batch
from jaxbucket.base.bucket import Bucket
from jaxbucket.base.checks import MAX_LENGTH
from jaxbucket.base.padding import PadValue, pad_arrays
from jaxbucket.data.row_checks import check_row_lengths, check_rows, span_lengths
from jaxbucket.data.segments import row_mask, row_segments, with_segments
from jaxbucket.data.source import check_index
from jaxbucket.data.token_index import (
    OFFSETS,
    array_path,
    file_digest,
    index_fingerprint,
    map_array,
    read_index,
)


class TokenFile:
    """A random-access source that gathers batches without a Python loop over all rows.

    Example:
      >>> import tempfile
      >>> from jaxbucket.data.token_file_writer import write_token_file
      >>> path = tempfile.mkdtemp() + "/corpus"
      >>> examples = [{"tokens": np.arange(n, dtype=np.uint16)} for n in (2, 3)]
      >>> file = write_token_file(path, examples)
      >>> len(file), file.lengths, file[1]["tokens"]
      (2, array([2, 3], dtype=int32), array([0, 1, 2], dtype=uint16))
      >>> file.collate(np.array([1, -1]), Bucket(2, 4)).features["tokens"]
      array([[0, 1, 2, 0],
             [0, 0, 0, 0]], dtype=uint16)

    Args:
      path: a folder written by `write_token_file`.

    Attributes:
      path: the absolute path of the folder.
      lengths: `[N]` int32, the length of every example, read-only.
      sequences: names of the features with one entry per token.
      fingerprint: 32 hex digits that identify the contents.

    Raises:
      ValueError: if the folder is not a token file, has a different version, or has a
        missing, truncated or changed file. Opening checks only headers and a few pages
        of each file, in constant time; `verify` reads everything.
    """

    gathers_packed_rows: Literal[True] = True

    def __init__(self, path: str | os.PathLike[str]):
        self.path = pathlib.Path(path).absolute()
        self._index = read_index(self.path)
        self._arrays = {
            name: map_array(array_path(self.path, name), entry)
            for name, entry in self._index["files"].items()
        }
        self._offsets = self._arrays.pop(OFFSETS)
        self.sequences: tuple[str, ...] = tuple(self._index["sequences"])
        self.fingerprint = index_fingerprint(self._index)

    def __reduce__(self) -> tuple[Any, ...]:
        # Workers map the files again: a pickled memory map would contain all the data.
        return _reopen, (self.path, self.fingerprint)

    def __repr__(self) -> str:
        return f"TokenFile({str(self.path)!r}, {len(self)} examples)"

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        index = check_index(self, index)
        start, end = (int(x) for x in self._offsets[index : index + 2])
        return {
            name: np.array(
                values[start:end] if name in self.sequences else values[index]
            )
            for name, values in self._arrays.items()
        }

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        lengths = np.diff(self._offsets)
        if lengths.min() < 1 or lengths.max() > MAX_LENGTH:
            raise ValueError(
                f"{array_path(self.path, OFFSETS)} has examples of {lengths.min()} to "
                f"{lengths.max()} tokens, so it was changed. Write the token file "
                "again."
            )
        lengths = lengths.astype(np.int32)
        lengths.setflags(write=False)
        return lengths

    def _with_joined_examples(self, splits: np.ndarray) -> TokenFile:
        """Returns the same tokens as longer examples, because they are adjacent.

        The file must have no features with one value per example.

        Args:
          splits: `[M + 1]` integers; `splits[m]` is the first of the examples that
            example m joins.
        """
        joined = _reopen(self.path, self.fingerprint)
        joined._offsets = joined._offsets[splits]
        return joined

    def collate(
        self,
        rows: np.ndarray,
        bucket: Bucket,
        *,
        pad_value: PadValue = 0,
        truncate: bool = False,
    ) -> Batch:
        """Returns the batch that `collate_rows` would return for these examples.

        Args:
          rows: `[B]` integers, the example in each row, -1 for an empty row; or, for
            packed rows, `[B, max_segments]` with -1 after the last example of a row.
          bucket: the shape (B, T).
          pad_value: number that fills padded positions and empty rows, or a mapping
            from sequence feature to number (0 for features not named). A single nonzero
            number is allowed only if there is one sequence feature.
          truncate: whether to truncate examples longer than T instead of raising.

        Raises:
          ValueError: if an example, or the examples of a row together, are longer than
            T, or if `rows` contains an index that is not an example.
        """
        rows = check_rows(rows, len(self), bucket)
        starts, lengths = self._bounds(rows)
        if truncate:
            lengths = np.minimum(lengths, bucket.tokens_per_row)
        check_row_lengths(lengths, bucket)
        if rows.ndim == 2:
            return self._collate_packed(rows, starts, lengths, bucket, pad_value)
        return self._collate_spans(rows, starts, lengths, bucket, pad_value)

    def collate_spans(
        self,
        rows: np.ndarray,
        begins: np.ndarray,
        lengths: np.ndarray,
        bucket: Bucket,
        *,
        pad_value: PadValue = 0,
    ) -> Batch:
        """Returns a batch of one span of each example, such as a chunk.

        Args:
          rows: `[B]` integers, the example in each row, -1 for an empty row; or, for
            packed rows, `[B, max_segments]` with -1 after the last example of a row.
          begins: integers of the same shape, the first token of each span within its
            example.
          lengths: integers of the same shape, the number of tokens of each span. Both
            `begins` and `lengths` are ignored for empty entries.
          bucket: the shape (B, T).
          pad_value: number that fills padded positions and empty rows, or a mapping
            from sequence feature to number (0 for features not named). A single nonzero
            number is allowed only if there is one sequence feature.

        Raises:
          ValueError: if a span is not within its example or is longer than T, or if
            `rows` contains an index that is not an example.
        """
        rows = check_rows(rows, len(self), bucket)
        starts, example_lengths = self._bounds(rows)
        lengths = span_lengths(rows, begins, lengths, example_lengths)
        check_row_lengths(lengths, bucket)
        if rows.ndim == 2:
            starts = starts + begins
            return self._collate_packed(rows, starts, lengths, bucket, pad_value)
        return self._collate_spans(rows, starts + begins, lengths, bucket, pad_value)

    def _bounds(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the start of each example in the file and its length, 0 if empty."""
        starts = self._offsets[rows]
        lengths = self._offsets[rows + 1] - starts
        lengths[rows == EMPTY_ROW] = 0
        return starts, lengths

    def _collate_spans(
        self,
        rows: np.ndarray,
        starts: np.ndarray,
        lengths: np.ndarray,
        bucket: Bucket,
        pad_value: PadValue,
    ) -> Batch:
        """Gathers a batch with one span in each row, from `[B]` starts and lengths."""
        filled = np.flatnonzero(rows != EMPTY_ROW)
        starts = starts[filled]
        mask = row_mask(lengths, bucket)

        def gather(values: np.ndarray, pad: np.ndarray) -> np.ndarray:
            tokens = _gather_windows(values, starts, filled, lengths, bucket)
            np.copyto(tokens, pad, where=_expand_mask(values, ~mask))
            return tokens

        features = self._features(rows, pad_value, gather)
        return with_segments(features, self.sequences[0], mask)

    def _collate_packed(
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
        # The position in the file of each token of the batch.
        example_starts = np.take_along_axis(starts, np.maximum(ids - 1, 0), axis=1)
        indices = (example_starts + positions)[mask]

        def gather(values: np.ndarray, pad: np.ndarray) -> np.ndarray:
            tokens = np.full((*mask.shape, *values.shape[1:]), pad)
            tokens[mask] = values[indices]
            return tokens

        features = self._features(rows, pad_value, gather)
        name = self.sequences[0]
        return Batch(features, {name: ids}, {name: positions})

    def _features(
        self,
        rows: np.ndarray,
        pad_value: PadValue,
        gather: Callable[[np.ndarray, np.ndarray], np.ndarray],
    ) -> dict[str, np.ndarray]:
        """Gathers sequences with `gather`, and all other features by `rows`."""
        arrays, sequences = self._arrays, self.sequences
        pads = pad_arrays(pad_value, {name: arrays[name].dtype for name in sequences})
        return {
            name: gather(x, pads[name])
            if name in sequences
            else _gather_examples(x, rows)
            for name, x in arrays.items()
        }

    def verify(self) -> None:
        """Reads all files and compares them with the digests in the index.

        Raises:
          ValueError: if a file has changed.
        """
        for name, entry in self._index["files"].items():
            path = array_path(self.path, name)
            digest = file_digest(path)
            if digest != entry["digest"]:
                raise ValueError(
                    f"{path} has changed since it was written: its digest is {digest}, "
                    f"not {entry['digest']}. Write the token file again."
                )


def _reopen(path: pathlib.Path, fingerprint: str) -> TokenFile:
    """Opens the file again in a worker and checks that it is unchanged."""
    file = TokenFile(path)
    if file.fingerprint != fingerprint:
        raise ValueError(
            f"{path} has changed since it was opened: its fingerprint is "
            f"{file.fingerprint}, not {fingerprint}. Open it again, and measure the "
            "lengths again."
        )
    return file


def _gather_examples(values: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Returns the values of the examples in `rows`, `[*rows, ...]`; 0 if empty."""
    gathered = np.zeros((*rows.shape, *values.shape[1:]), values.dtype)
    filled = rows != EMPTY_ROW
    gathered[filled] = values[rows[filled]]
    return gathered


def _gather_windows(
    values: np.ndarray,
    starts: np.ndarray,
    filled: np.ndarray,
    lengths: np.ndarray,
    bucket: Bucket,
) -> np.ndarray:
    """Returns `[B, T, ...]`, the T tokens from each start in the filled rows.

    Values after the length of a row are arbitrary.
    """
    window = (bucket.tokens_per_row, *values.shape[1:])
    # A window must not extend beyond the last token. The few spans that are too close
    # to it are copied one at a time.
    num_windows = max(0, len(values) - bucket.tokens_per_row + 1)
    windows = np.lib.stride_tricks.as_strided(
        values,
        (num_windows, *window),
        (values.strides[0], *values.strides),
        writeable=False,
    )
    inside = starts < num_windows
    if len(starts) == bucket.batch_size and inside.all():
        return windows[starts]
    out = np.empty((bucket.batch_size, *window), values.dtype)
    out[filled[inside]] = windows[starts[inside]]
    for row, start in zip(filled[~inside], starts[~inside], strict=True):
        out[row, : lengths[row]] = values[start : start + lengths[row]]
    return out


def _expand_mask(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Adds trailing axes of size 1 to a `[B, T]` mask, to broadcast with a feature."""
    return mask.reshape(*mask.shape, *(1,) * (values.ndim - 1))
