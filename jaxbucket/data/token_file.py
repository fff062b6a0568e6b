"""Examples end to end in memory-mapped arrays, gathered a batch at a time.

A token file is a folder of plain `.npy` files: one for each feature, `offsets.npy` that
says where each example begins, and `index.json` that says what each of them is. numpy
reads them without this library.
"""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from jaxbucket.base.batch import EMPTY_ROW, Batch
from jaxbucket.base.buckets import Bucket
from jaxbucket.base.checks import MAX_LENGTH
from jaxbucket.base.padding import PadValue, pad_arrays
from jaxbucket.data.row_checks import check_rows, fit_lengths, span_lengths
from jaxbucket.data.segments import row_mask, row_segments, with_segments
from jaxbucket.data.token_index import (
    OFFSETS,
    array_path,
    digest_of,
    fingerprint_of,
    map_array,
    read_index,
)


class TokenFile:
    """A source of examples, `[index]`, that gathers the rows of a batch at once.

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
      path: what `write_token_file` wrote.

    Attributes:
      path: the folder, absolute.
      lengths: `[N]` int32, of every example; not to be written to.
      sequences: the features that have a position for each token.
      fingerprint: 32 hex digits that name all contents, as they were written.

    Raises:
      ValueError: if the folder is not a token file, is of another version, or has a
        file that is missing, cut or changed, as far as headers and some pages tell in a
        time that does not depend on its size; `verify` reads everything.
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
        self.fingerprint = fingerprint_of(self._index)

    def __reduce__(self) -> tuple[Any, ...]:
        # Worker processes map the files anew: a pickled map would be all its contents.
        return _reopened, (self.path, self.fingerprint)

    def __repr__(self) -> str:
        return f"TokenFile({str(self.path)!r}, {len(self)} examples)"

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(f"`index={index}` is not from 0 to {len(self) - 1}.")
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
                f"{lengths.max()} tokens: it was changed. Write the token file again."
            )
        lengths = lengths.astype(np.int32)
        lengths.setflags(write=False)
        return lengths

    def collate(
        self,
        rows: np.ndarray,
        bucket: Bucket,
        *,
        pad_value: PadValue = 0,
        truncate: bool = False,
    ) -> Batch:
        """Returns what `collate_rows` gives for the examples, without a loop over them.

        Args:
          rows: `[B]` integers, the example in each row; -1 for an empty row. Of packed
            rows `[B, max_segments]`, and -1 after the last of a row.
          bucket: the shape (B, T).
          pad_value: what fills the sequences after their end, and in empty rows: name
            -> number, 0 for those without one. A number alone is of the only one there
            is.
          truncate: cut examples longer than T instead of refusing them; not those of
            packed rows.

        Raises:
          ValueError: if an example is longer than T, or those of a row are together, or
            a row is not an example.
        """
        rows = check_rows(rows, len(self), bucket)
        starts, lengths = self._bounds(rows)
        if rows.ndim == 2:
            if truncate:
                raise ValueError(
                    "`truncate=True`: packed rows are not truncated. Put what does not "
                    "fit into another row."
                )
            fit_lengths(lengths.sum(axis=1), bucket, truncate=False)
            return self._gathered_packed(rows, starts, lengths, bucket, pad_value)
        lengths = fit_lengths(lengths, bucket, truncate)
        return self._gathered(rows, starts, lengths, bucket, pad_value)

    def collate_spans(
        self,
        rows: np.ndarray,
        begins: np.ndarray,
        lengths: np.ndarray,
        bucket: Bucket,
        *,
        pad_value: PadValue = 0,
    ) -> Batch:
        """Returns a batch of a span of each example, such as one chunk of it.

        Args:
          rows: `[B]` integers, the example in each row; -1 for an empty row.
          begins: `[B]` integers, the first token of the span, counted in its example.
          lengths: `[B]` integers, how many tokens it has. What `begins` and `lengths`
            say of an empty row counts for nothing.
          bucket: the shape (B, T).
          pad_value: what fills the sequences after their end, and in empty rows: name
            -> number, 0 for those without one. A number alone is of the only one there
            is.

        Raises:
          ValueError: if a span is not within its example or is longer than T, or a row
            is not an example.
        """
        rows = check_rows(rows, len(self), bucket)
        starts, example_lengths = self._bounds(rows)
        lengths = span_lengths(rows, begins, lengths, example_lengths)
        lengths = fit_lengths(lengths, bucket, truncate=False)
        return self._gathered(rows, starts + begins, lengths, bucket, pad_value)

    def _bounds(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`[B]` first tokens of the examples, `[B]` lengths: 0 of an empty row."""
        starts = self._offsets[rows]
        lengths = self._offsets[rows + 1] - starts
        lengths[rows == EMPTY_ROW] = 0
        return starts, lengths

    def _gathered(
        self,
        rows: np.ndarray,
        starts: np.ndarray,
        lengths: np.ndarray,
        bucket: Bucket,
        pad_value: PadValue,
    ) -> Batch:
        """The batch of `[B]` spans, one in each row: where they start, and lengths."""
        filled = np.flatnonzero(rows != EMPTY_ROW)
        starts = starts[filled]
        mask = row_mask(lengths, bucket)

        def gather(values: np.ndarray, pad: np.ndarray) -> np.ndarray:
            tokens = _gather(values, starts, filled, lengths, bucket)
            np.copyto(tokens, pad, where=_as_wide_as(values, ~mask))
            return tokens

        features = self._features(rows, pad_value, gather)
        return with_segments(features, self.sequences[0], mask)

    def _gathered_packed(
        self,
        rows: np.ndarray,
        starts: np.ndarray,
        lengths: np.ndarray,
        bucket: Bucket,
        pad_value: PadValue,
    ) -> Batch:
        """The batch of `[B, S]` examples, one after another in each row."""
        ids, positions = row_segments(lengths, bucket.seq_len)
        mask = ids > 0
        # The index in the file of each token of the batch.
        begins = np.take_along_axis(starts, np.maximum(ids - 1, 0), axis=1)
        indices = (begins + positions)[mask]

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
        """Sequences as they are gathered, and what is one for an example, by `rows`."""
        arrays, sequences = self._arrays, self.sequences
        pads = pad_arrays(pad_value, {name: arrays[name].dtype for name in sequences})
        return {
            name: gather(x, pads[name]) if name in sequences else _by_row(x, rows)
            for name, x in arrays.items()
        }

    def verify(self) -> None:
        """Reads everything, and compares it with the digests that were written.

        Raises:
          ValueError: if a file has changed.
        """
        for name, entry in self._index["files"].items():
            path = array_path(self.path, name)
            now = digest_of(path)
            if now != entry["digest"]:
                raise ValueError(
                    f"{path} is not what was written: its digest is {now}, not "
                    f"{entry['digest']}. Write the token file again."
                )


def _reopened(path: pathlib.Path, fingerprint: str) -> TokenFile:
    """The file that had this fingerprint when it was pickled."""
    file = TokenFile(path)
    if file.fingerprint != fingerprint:
        raise ValueError(
            f"{path} was changed since it was opened: its fingerprint is "
            f"{file.fingerprint}, not {fingerprint}. Open it again, and measure it."
        )
    return file


def _by_row(values: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The values of the examples in `rows`, `[*rows, ...]`; 0 where there is none."""
    gathered = np.zeros((*rows.shape, *values.shape[1:]), values.dtype)
    filled = rows != EMPTY_ROW
    gathered[filled] = values[rows[filled]]
    return gathered


def _gather(
    values: np.ndarray,
    starts: np.ndarray,
    filled: np.ndarray,
    lengths: np.ndarray,
    bucket: Bucket,
) -> np.ndarray:
    """`[B, T, ...]`: the tokens from each start on, in the rows that are filled.

    What stands after the `[B]` lengths is any token.
    """
    window = (bucket.seq_len, *values.shape[1:])
    # A window must not reach beyond the last token; those that would are few.
    num_windows = max(0, len(values) - bucket.seq_len + 1)
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


def _as_wide_as(values: np.ndarray, where: np.ndarray) -> np.ndarray:
    """`[B, T]` with as many axes of 1 behind as the feature has."""
    return where.reshape(*where.shape, *(1,) * (values.ndim - 1))
