"""Token files: concatenated examples in memory-mapped arrays.

A token file is a folder of plain `.npy` files, which numpy can read without this
library: one file for each feature, and `offsets.npy` with the start of each example.
`index.json` names these files, with two digests of each: of the whole file, and of a
few fixed pages, which are compared whenever the token file is opened.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any

import numpy as np

from jaxbucket.base.digest import digest, file_digest
from jaxbucket.base.files import complete
from jaxbucket.base.notes import Noting
from jaxbucket.data.example import Example
from jaxbucket.data.example_spec import ExampleSpec
from jaxbucket.data.token_source import TokenSource

_OFFSETS = "offsets"
_FORMAT = {"format": "jaxbucket.TokenFile", "version": 2}
_INDEX = "index.json"
_PAGE_BYTES, _PAGES = 4096, 16


class TokenFile(TokenSource):
    """A random-access source that gathers batches without a Python loop over all rows.

    Example:
      >>> import tempfile
      >>> import numpy as np
      >>> path = tempfile.mkdtemp() + "/corpus"
      >>> examples = [{"tokens": np.arange(n, dtype=np.uint16)} for n in (2, 3)]
      >>> file = write_token_file(path, examples)
      >>> len(file), file.lengths, file[1]["tokens"]
      (2, array([2, 3], dtype=int32), array([0, 1, 2], dtype=uint16))
      >>> from jaxbucket import Bucket
      >>> file.collate(np.array([1, -1]), Bucket(2, 4)).features["tokens"]
      array([[0, 1, 2, 0],
             [0, 0, 0, 0]], dtype=uint16)

    Args:
      path: a folder written by `write_token_file`.

    Attributes:
      path: the absolute path of the folder.
      arrays: the memory-mapped array of each feature.
      num_tokens: the number of tokens of all examples.
      lengths: `[N]` int32, the length of every example, read-only.
      sequences: names of the features with one entry per token.
      fingerprint: 32 hex digits that identify the contents.

    Raises:
      ValueError: if the folder is not a token file, has a different version, or has a
        missing, truncated or changed file. Opening reads only a few pages of each file,
        in constant time.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = pathlib.Path(path).absolute()
        index = _read_index(self.path)
        self.fingerprint = _fingerprint(index)
        self.arrays = {
            name: _map_array(_array_path(self.path, name), digests)
            for name, digests in index["files"].items()
        }
        offsets = self.arrays.pop(_OFFSETS)
        self._starts, self._ends = offsets[:-1], offsets[1:]
        self.num_tokens = int(offsets[-1])
        self.files = (self,)
        self.sequences = tuple(index["sequences"])

    def __reduce__(self) -> tuple[Any, ...]:
        # Workers map the files again: a pickled memory map would contain all the data.
        return _reopen, (self.path, self.fingerprint)

    def __repr__(self) -> str:
        return f"TokenFile({str(self.path)!r}, {len(self)} examples)"


def _reopen(path: pathlib.Path, fingerprint: str) -> TokenFile:
    """Opens the file again in a worker and checks that it is unchanged."""
    file = TokenFile(path)
    if file.fingerprint != fingerprint:
        raise ValueError(
            f"{path} has changed since it was opened. Open it again, and measure the "
            "lengths again."
        )
    return file


def _write_index(folder: pathlib.Path, names: list[str], sequences: list[str]) -> None:
    """Writes the index of the arrays in a folder, those of `names` and the offsets."""
    paths = {name: _array_path(folder, name) for name in (*names, _OFFSETS)}
    files = {
        name: {"all": file_digest(path), "pages": _pages_digest(path)}
        for name, path in paths.items()
    }
    index = {**_FORMAT, "sequences": sequences, "files": files}
    (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _array_path(folder: pathlib.Path, name: str) -> pathlib.Path:
    """Returns the path of the array of a feature."""
    return folder / f"{name}.npy"


def _pages_digest(path: pathlib.Path) -> str:
    """Returns the digest of the size and of 16 evenly spaced pages of a file."""
    size = path.stat().st_size
    last = max(0, size - _PAGE_BYTES)
    pages = []
    with path.open("rb") as file:
        for page in range(_PAGES):
            # In a small file the pages overlap and cover all of it.
            file.seek(last * page // (_PAGES - 1))
            pages.append(file.read(_PAGE_BYTES))
    return digest(str(size).encode(), *pages)


def _fingerprint(index: Mapping[str, Any]) -> str:
    """Returns 32 hex digits that identify the contents."""
    files = {name: digests["all"] for name, digests in index["files"].items()}
    return digest(json.dumps([index["sequences"], files], sort_keys=True).encode())


def _read_index(folder: pathlib.Path) -> dict[str, Any]:
    """Reads the index of a folder."""
    try:
        index = json.loads((folder / _INDEX).read_bytes())
        if {name: index.get(name) for name in _FORMAT} != _FORMAT:
            raise ValueError(f"its index does not have {_FORMAT}")
        names = [*index["sequences"], _OFFSETS]
        if len(names) < 2 or any(name not in index["files"] for name in names):
            raise ValueError("its index does not name its arrays")
        _fingerprint(index)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{folder} is not a token file: {error}. Pass a folder written by "
            "`write_token_file`, or write it again."
        ) from None
    return index


def _map_array(path: pathlib.Path, digests: Mapping[str, str]) -> np.ndarray:
    """Returns the array in a `.npy` file, whose digests in the index are given."""
    if not path.exists() or _pages_digest(path) != digests["pages"]:
        raise ValueError(
            f"{path} is missing, was truncated or changed, or is the array of a "
            "different feature. Write the token file again."
        )
    # A plain view, because slicing a `memmap` takes a microsecond longer.
    return np.asarray(np.load(path, mmap_mode="r"))


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
        _write_index(draft, *_write(draft, examples, sequences))
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
        offsets = open_column(_OFFSETS, np.dtype(np.int64), ())
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
        path = _array_path(folder, name)
        if path.parent != folder or path.exists():
            raise ValueError(
                f"Feature {name!r} cannot be stored as a file of this name. Rename it, "
                "using letters, digits, '_' and '-'."
            )
        # Types of ml_dtypes may be of kind "f", and are not numpy's own.
        if dtype.kind not in "biufc" or dtype.isbuiltin == 2:
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
