"""Writes token files: examples concatenated in arrays that grow."""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import IO

import numpy as np

from jaxbucket.base.files import complete
from jaxbucket.base.notes import Noting
from jaxbucket.data.example import Example
from jaxbucket.data.example_spec import ExampleSpec
from jaxbucket.data.token_file import OFFSETS, TokenFile, array_path, write_index


def write_token_file(
    path: str | os.PathLike[str],
    examples: Iterable[Example],
    *,
    sequences: Sequence[str] | None = None,
) -> TokenFile:
    """Writes examples to a new token file.

    The folder appears under its name once all examples are written.

    Example:
      >>> import tempfile
      >>> path = tempfile.mkdtemp() + "/corpus"
      >>> file = write_token_file(path, ({"tokens": np.arange(n)} for n in (2, 3)))
      >>> TokenFile(path).lengths
      array([2, 3], dtype=int32)

    Args:
      path: the folder to create. It must not exist.
      examples: dicts of arrays, all with the same features, dtypes and trailing shapes.
        They are read once, one at a time.
      sequences: names of the features with one entry per token, `[n, ...]`. By default
        all features with a leading axis. All other features are stacked.

    Returns:
      The new token file, opened for reading.

    Raises:
      ValueError: if `path` exists; if there are no examples; if an example is empty or
        differs from the first one; or if a feature cannot be stored, because of its
        dtype or because its name is not a valid file name.
    """
    path = pathlib.Path(path)
    if path.exists():
        raise ValueError(f"`path={str(path)!r}` already exists. Pass a new path.")
    with complete(path) as draft:
        draft.mkdir()
        write_index(draft, *_write(draft, examples, sequences))
    return TokenFile(path)


def _write(
    folder: pathlib.Path, examples: Iterable[Example], sequences: Sequence[str] | None
) -> tuple[list[str], list[str]]:
    """Writes all arrays. Returns the names of the features and of the sequences."""
    examples = iter(examples)
    first = next(examples, None)
    if first is None:
        raise ValueError("`examples` is empty. Pass at least one example.")
    spec = ExampleSpec(first, sequences)
    names = list(spec.axes)
    with contextlib.ExitStack() as stack:

        def open_column(name: str, dtype: np.dtype, shape: tuple[int, ...]) -> _Column:
            column = _Column(folder, name, dtype, shape)
            return stack.enter_context(contextlib.closing(column))

        columns = {
            name: open_column(name, x.dtype, x.shape[1:] if name in names else x.shape)
            for name, x in spec.arrays.items()
        }
        offsets = open_column(OFFSETS, np.dtype(np.int64), ())
        offsets.append(np.zeros(1, np.int64))
        total = 0
        for number, example in enumerate(itertools.chain([first], examples)):
            with Noting(f"This is example {number}."):
                arrays = spec.match(example)
                (length,) = spec.lengths(arrays).values()
            total += length
            for name, value in arrays.items():
                columns[name].append(value if name in names else value[None])
            offsets.append(np.array([total]))
    return list(spec.arrays), names


class _Column:
    """A `.npy` file that grows along its first axis."""

    def __init__(
        self,
        folder: pathlib.Path,
        name: str,
        dtype: np.dtype,
        shape: tuple[int, ...],
    ):
        path = array_path(folder, name)
        if path.parent != folder or path.exists():
            raise ValueError(
                f"Feature {name!r} cannot be stored as a file of this name. Rename it, "
                "using letters, digits, '_' and '-'."
            )
        if dtype.kind not in "biufc" or not _is_numpy_dtype(dtype):
            raise ValueError(
                f"Feature {name!r} is {dtype}, which a `.npy` file cannot store. "
                "Convert it to float32 or int32, or store its `x.view(np.uint16)`."
            )
        self._dtype = dtype
        self._shape = shape
        self._length = 0
        self._file: IO[bytes] = path.open("wb")
        self._write_header()

    def append(self, values: np.ndarray) -> None:
        self._file.write(np.ascontiguousarray(values).data)
        self._length += len(values)

    def close(self) -> None:
        # numpy pads the header, so a longer first axis fits into the same space.
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


def _is_numpy_dtype(dtype: np.dtype) -> bool:
    """Returns whether the header of a `.npy` file preserves this dtype."""
    descr = np.lib.format.dtype_to_descr(dtype)
    try:
        return np.lib.format.descr_to_dtype(descr) == dtype
    except (TypeError, ValueError):
        return False
