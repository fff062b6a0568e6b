"""Examples end to end in memory-mapped arrays, gathered a batch at a time.

A token file is a folder of plain `.npy` files: one for each feature, `offsets.npy` that
says where each example begins, and `index.json` that says what each of them is. numpy
reads them without this library.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import shutil
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any, Literal

import numpy as np

from jaxbucket.base.batch import EMPTY_ROW, Batch
from jaxbucket.base.buckets import Bucket
from jaxbucket.base.checks import MAX_LENGTH
from jaxbucket.base.padding import PadValue, pad_arrays
from jaxbucket.data.collate import (
    check_rows,
    fit_lengths,
    row_mask,
    span_lengths,
    with_segments,
)
from jaxbucket.data.example import (
    Example,
    as_arrays,
    common_length,
    matching_arrays,
    sequence_names,
)
from jaxbucket.data.segments import row_segments
from jaxbucket.data.token_index import (
    OFFSETS,
    array_path,
    digest_of,
    fingerprint_of,
    is_array_name,
    map_arrays,
    read_index,
    write_index,
)


class TokenFile:
    """A source of examples, `[index]`, that gathers the rows of a batch at once.

    Example:
      >>> import tempfile
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
      ValueError: if the folder is no token file, is of another version, or has a file
        that is missing, cut or changed, as far as headers and some pages tell in a time
        that does not depend on its size; `verify` reads everything.
    """

    gathers_packed_rows: Literal[True] = True

    def __init__(self, path: str | os.PathLike[str]):
        self.path = pathlib.Path(path).absolute()
        self._index = read_index(self.path)
        self._arrays = map_arrays(self.path, self._index)
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
            rows `[B, max_segments]`, and -1 behind the last of a row.
          bucket: the shape (B, T).
          pad_value: what fills the sequences behind their end, and in empty rows; as
            in `collate_rows`.
          truncate: cut examples longer than T instead of refusing them; no packed ones.

        Raises:
          ValueError: if an example is longer than T, or those of a row are together, or
            a row is no example.
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
        """Returns the same of a part of each example, such as one chunk of it.

        Args:
          rows: `[B]` integers, the example in each row; -1 for an empty row.
          begins: `[B]` integers, the first token of the part, counted in its example.
          lengths: `[B]` integers, how many tokens it has. What `begins` and `lengths`
            say of an empty row counts for nothing.
          bucket: the shape (B, T).
          pad_value: what fills the sequences behind their end, and in empty rows; as
            in `collate_rows`.

        Raises:
          ValueError: if a part is no part of its example or longer than T, or a row is
            no example.
        """
        rows = check_rows(rows, len(self), bucket)
        starts, whole = self._bounds(rows)
        lengths = span_lengths(rows, begins, lengths, whole)
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
        """The batch of `[B]` tokens from `[B]` on, beside what is the examples'."""
        filled = np.flatnonzero(rows != EMPTY_ROW)
        starts = starts[filled]
        mask = row_mask(lengths, bucket)
        pads = self._pads(pad_value)
        features = {}
        for name, values in self._arrays.items():
            if name in self.sequences:
                features[name] = _gather(values, starts, filled, lengths, bucket)
                np.copyto(features[name], pads[name], where=_as_wide_as(values, ~mask))
            else:
                features[name] = _of_examples(values, rows)
        return with_segments(features, self.sequences[0], mask)

    def _gathered_packed(
        self,
        rows: np.ndarray,
        starts: np.ndarray,
        lengths: np.ndarray,
        bucket: Bucket,
        pad_value: PadValue,
    ) -> Batch:
        """The batch of `[B, S]` examples, one behind the other in each row."""
        ids, positions = row_segments(lengths, bucket.seq_len)
        mask = ids > 0
        # The token of the file at every place that has one.
        begins = np.take_along_axis(starts, np.maximum(ids - 1, 0), axis=1)
        tokens = (begins + positions)[mask]
        pads = self._pads(pad_value)
        features = {}
        for name, values in self._arrays.items():
            if name in self.sequences:
                shape = (*mask.shape, *values.shape[1:])
                features[name] = np.full(shape, pads[name])
                features[name][mask] = values[tokens]
            else:
                features[name] = _of_examples(values, rows)
        name = self.sequences[0]
        return Batch(features, {name: ids}, {name: positions})

    def _pads(self, pad_value: PadValue) -> dict[str, np.ndarray]:
        dtypes = {name: self._arrays[name].dtype for name in self.sequences}
        return pad_arrays(pad_value, dtypes)

    def verify(self) -> None:
        """Reads everything, and compares it with the digests that were written.

        Raises:
          ValueError: if a file has changed.
        """
        for name, entry in self._index["files"].items():
            path = array_path(self.path, name)
            found = digest_of(path)
            if found != entry["digest"]:
                raise ValueError(
                    f"{path} is not what was written: its digest is {found}, not "
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


def _of_examples(values: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """What is one for an example, `[*rows, ...]`; zeros where there is none."""
    found = np.zeros((*rows.shape, *values.shape[1:]), values.dtype)
    filled = rows != EMPTY_ROW
    found[filled] = values[rows[filled]]
    return found


def write_token_file(
    path: str | os.PathLike[str],
    examples: Iterable[Example],
    *,
    sequences: Sequence[str] | None = None,
) -> TokenFile:
    """Writes examples to a folder, which appears when all of them are there.

    Args:
      path: where no file or folder is yet.
      examples: dicts of arrays, all with the same features, dtypes and trailing
        shapes; read once, one at a time.
      sequences: the features with a position for each token, `[n, ...]`, by default
        all with a leading axis. Everything else is stacked.

    Raises:
      ValueError: if there is something at `path`, there are no examples, one has no
        tokens or differs from the first, or a feature's name cannot be a file's.
    """
    path = pathlib.Path(path)
    if path.exists():
        raise ValueError(f"`path={str(path)!r}` exists already: name another.")
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    draft.mkdir()
    try:
        write_index(draft, *_write(draft, examples, sequences))
        os.rename(draft, path)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return TokenFile(path)


def _write(
    folder: pathlib.Path, examples: Iterable[Example], sequences: Sequence[str] | None
) -> tuple[list[str], list[str]]:
    """Writes all arrays; returns the features, and which of them are sequences."""
    examples = iter(examples)
    first = next(examples, None)
    if first is None:
        raise ValueError("`examples` is empty: there is nothing to write.")
    template = as_arrays(first)
    names = sequence_names(template, sequences)
    with contextlib.ExitStack() as stack:
        columns = {
            name: stack.enter_context(
                _column(
                    folder, name, x.dtype, x.shape[1:] if name in names else x.shape
                )
            )
            for name, x in template.items()
        }
        offsets = stack.enter_context(_column(folder, OFFSETS, np.dtype(np.int64), ()))
        total = 0
        offsets.append(np.zeros(1, np.int64))
        for number, example in enumerate(_chain(first, examples)):
            arrays = matching_arrays(example, template, names, number)
            length = common_length(arrays, names, number)
            if length > MAX_LENGTH:
                raise ValueError(
                    f"Row {number} has length {length}, beyond {MAX_LENGTH}: split it."
                )
            total += length
            for name, value in arrays.items():
                columns[name].append(value if name in names else value[None])
            offsets.append(np.array([total]))
    return list(template), names


def _chain(first: Example, rest: Iterator[Example]) -> Iterator[Example]:
    yield first
    yield from rest


class _Column:
    """A `.npy` file that grows along its first axis."""

    def __init__(self, path: pathlib.Path, dtype: np.dtype, shape: tuple[int, ...]):
        self._dtype = dtype
        self._shape = shape
        self._length = 0
        self._file: IO[bytes] = path.open("wb")
        self._write_header()

    def append(self, values: np.ndarray) -> None:
        self._file.write(np.ascontiguousarray(values).data)
        self._length += len(values)

    def close(self) -> None:
        # numpy leaves room in the header for the first axis to grow.
        self._file.seek(0)
        self._write_header()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def _write_header(self) -> None:
        header = {
            "descr": np.lib.format.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": (self._length, *self._shape),
        }
        np.lib.format.write_array_header_1_0(self._file, header)


@contextlib.contextmanager
def _column(
    folder: pathlib.Path, name: str, dtype: np.dtype, shape: tuple[int, ...]
) -> Iterator[_Column]:
    path = array_path(folder, name)
    if not is_array_name(name) or path.exists():
        raise ValueError(
            f"Feature {name!r} cannot be a file of this name: call it otherwise, by "
            "letters, digits, '_' and '-'."
        )
    if dtype.kind not in "biufc" or not _is_of_numpy(dtype):
        raise ValueError(
            f"Feature {name!r} is {dtype}, which is not numpy's own of numbers, so a "
            "`.npy` file would lose it: give it another, such as float32 or int32, or "
            "write its bits, `x.view(np.uint16)`, and view them back."
        )
    column = _Column(path, dtype, shape)
    try:
        yield column
    finally:
        column.close()


def _is_of_numpy(dtype: np.dtype) -> bool:
    """Whether the header of a file says which dtype it is."""
    descr = np.lib.format.dtype_to_descr(dtype)
    try:
        return np.lib.format.descr_to_dtype(descr) == dtype
    except (TypeError, ValueError):
        return False


def _gather(
    values: np.ndarray,
    starts: np.ndarray,
    filled: np.ndarray,
    lengths: np.ndarray,
    bucket: Bucket,
) -> np.ndarray:
    """`[B, T, ...]`: the tokens from each start on, in the rows that are filled.

    What stands behind the `[B]` lengths is any token.
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
