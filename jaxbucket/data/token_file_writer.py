"""Writing a token file: examples end to end in arrays that grow."""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import shutil
import uuid
from collections.abc import Iterable, Sequence
from typing import IO

import numpy as np

from jaxbucket.base.checks import MAX_LENGTH
from jaxbucket.data.example import (
    Example,
    as_arrays,
    common_length,
    matching_arrays,
    sequence_names,
)
from jaxbucket.data.token_file import TokenFile
from jaxbucket.data.token_index import OFFSETS, array_path, is_array_name, write_index


def write_token_file(
    path: str | os.PathLike[str],
    examples: Iterable[Example],
    *,
    sequences: Sequence[str] | None = None,
) -> TokenFile:
    """Writes examples to a folder, which appears when all of them are there.

    Example:
      >>> import tempfile
      >>> path = tempfile.mkdtemp() + "/corpus"
      >>> file = write_token_file(path, ({"tokens": np.arange(n)} for n in (2, 3)))
      >>> TokenFile(path).lengths
      array([2, 3], dtype=int32)

    Args:
      path: where no file or folder is yet.
      examples: dicts of arrays, all with the same features, dtypes and trailing
        shapes; read once, one at a time.
      sequences: the features with a position for each token, `[n, ...]`, by default
        all with a leading axis. Everything else is stacked.

    Returns:
      The file, opened.

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

        def column(name: str, dtype: np.dtype, shape: tuple[int, ...]) -> _Column:
            opened = _Column(folder, name, dtype, shape)
            return stack.enter_context(contextlib.closing(opened))

        columns = {
            name: column(name, x.dtype, x.shape[1:] if name in names else x.shape)
            for name, x in template.items()
        }
        offsets = column(OFFSETS, np.dtype(np.int64), ())
        offsets.append(np.zeros(1, np.int64))
        total = 0
        for number, example in enumerate(itertools.chain([first], examples)):
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
        if not is_array_name(name) or path.exists():
            raise ValueError(
                f"Feature {name!r} cannot be a file of this name: call it otherwise, "
                "by letters, digits, '_' and '-'."
            )
        if dtype.kind not in "biufc" or not _is_of_numpy(dtype):
            raise ValueError(
                f"Feature {name!r} is {dtype}, which is not numpy's own dtype of a "
                "number, so that a `.npy` file would lose it: give it another, such as "
                "float32 or int32, or write its bits, `x.view(np.uint16)`, and view "
                "them back."
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


def _is_of_numpy(dtype: np.dtype) -> bool:
    """Whether the header of a file says which dtype it is."""
    descr = np.lib.format.dtype_to_descr(dtype)
    try:
        return np.lib.format.descr_to_dtype(descr) == dtype
    except (TypeError, ValueError):
        return False
