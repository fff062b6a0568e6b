"""Reads lengths from a file that contains either lengths or examples to measure."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from jaxbucket.base.checks import check_lengths
from jaxbucket.base.progress import progress_bar
from jaxbucket.data.lengths.records import read_array_record, read_parquet
from jaxbucket.data.lengths.text import (
    ShowProgress,
    check_no_columns,
    chosen_columns,
    empty_file_error,
    incomplete_file_error,
    read_csv,
    read_jsonl,
    read_text,
    uncompressed_suffix,
)
from jaxbucket.data.lengths.values import Measure

_NUMPY = (".npy", ".npz")
# An array, a zip archive, and an empty zip archive.
_MAGIC = (b"\x93NUMPY", b"PK\x03\x04", b"PK\x05\x06")
_READERS: dict[
    str,
    Callable[
        [pathlib.Path, Sequence[str], Measure, ShowProgress], Iterator[np.ndarray]
    ],
] = {
    ".csv": read_csv,
    ".tsv": read_csv,
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".parquet": read_parquet,
    ".array_record": read_array_record,
    ".arrayrecord": read_array_record,
}


def read_lengths(
    path: pathlib.Path, columns: Sequence[str] = (), measure: Measure | None = None
) -> list[np.ndarray]:
    """Returns the lengths of every example in a file, which is read once.

    The suffix determines the format: `.npy`, `.npz`, `.csv`, `.tsv`, `.jsonl`,
    `.parquet` or `.array_record`. Any other file is text, with an example or a length
    on each line. Line-based files may be gzipped, as in `.jsonl.gz`. All formats but
    numpy's are read a few thousand examples at a time.

    Example:
      >>> import tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp(), "lines.txt")
      >>> _ = path.write_text("to be\\nor not to be\\n")
      >>> read_lengths(path, measure=Measure("words"))
      [array([2, 4], dtype=int32)]

    Args:
      path: path of the file.
      columns: names of arrays, columns or fields. Required if there are several.
      measure: rule that determines the length of an example. By default integers are
        lengths, and lists and bytes are measured.

    Returns:
      `[N]` integers from 1 to 2**31 - 1 for each of `columns`; one array by default.

    Raises:
      ValueError: if the file is missing, empty, truncated, or not of the format of its
        suffix, if there is no such column, or if an example has no length; the message
        names the row.
    """
    if path.is_dir():
        raise ValueError(f"`{path}` is a folder. Pass the path of a file.")
    measure = measure or Measure()
    try:
        if _kind(path) in _NUMPY:
            return _read_numpy(path, columns, measure)
        read = _READERS.get(_kind(path), read_text)
        with reading_bar(path.stat().st_size) as progress:
            parts = list(read(path, columns, measure, progress))
    except OSError as error:
        raise ValueError(
            f"`{path}` cannot be read: {error.strerror or error}. Pass a "
            "different file."
        ) from None
    if not any(part.size for part in parts):
        raise empty_file_error(path)
    return [np.concatenate(column) for column in zip(*parts, strict=True)]


def _kind(path: pathlib.Path) -> str:
    kind = uncompressed_suffix(path)
    if kind == path.suffix.lower():
        return kind
    if kind in _NUMPY or _READERS.get(kind) in (read_parquet, read_array_record):
        raise ValueError(
            f"`{path}` is gzipped, which only files of lines may be. Decompress it "
            "with `gunzip`."
        )
    return kind


def _read_numpy(
    path: pathlib.Path, columns: Sequence[str], measure: Measure
) -> list[np.ndarray]:
    if measure != Measure():
        raise ValueError(
            f"`{path}` contains lengths, not examples. Remove `--unit` and "
            "`--length-fn`."
        )
    return [_checked(path, *item) for item in _load(path, columns).items()]


def _checked(path: pathlib.Path, column: str, array: np.ndarray) -> np.ndarray:
    try:
        return check_lengths(array)
    except ValueError as error:
        where = f"`{path}`, column {column!r}" if column else f"`{path}`"
        raise ValueError(f"{where}: {error}") from None


def _load(path: pathlib.Path, columns: Sequence[str]) -> dict[str, np.ndarray]:
    """Returns the chosen arrays of a `.npz` file by name, or that of a `.npy` file.

    The array of a `.npy` file has the name "".
    """
    if not path.stat().st_size:
        raise empty_file_error(path)
    with path.open("rb") as file:
        # numpy would report any other file as a pickle, and suggest to load it.
        if not file.peek(8).startswith(_MAGIC):
            raise incomplete_file_error(path, "numpy", "it has no numpy header")
        with _numpy_errors(path):
            loaded = np.load(file)
        if isinstance(loaded, np.lib.npyio.NpzFile):
            names = chosen_columns(path, loaded.files, columns)
            with _numpy_errors(path):
                return {name: loaded[name] for name in names}
    check_no_columns(columns, f"`{path}` has one array without a name")
    return {"": loaded}


@contextlib.contextmanager
def _numpy_errors(path: pathlib.Path) -> Iterator[None]:
    """Replaces any exception of the numpy parser by one that names the file."""
    try:
        yield
    except Exception as error:
        text = str(error)
        # The header of an array of integers is always short.
        contents = {"Object arrays": "Python objects", "Header info": "large records"}
        for numpy_message, content in contents.items():
            if numpy_message in text:
                raise ValueError(
                    f"`{path}` contains {content} instead of numbers. Save the lengths "
                    "as integers with "
                    "`numpy.save(path, numpy.array(lengths, numpy.int32))`."
                ) from None
        raise incomplete_file_error(path, "numpy", error) from None


@contextlib.contextmanager
def reading_bar(size: int | None) -> Iterator[ShowProgress]:
    """Shows a progress bar while a file is read, if the output is a terminal.

    Yields a function that must be called with the fraction of the file read so far.

    Args:
      size: size of the file in bytes, or None if unknown.
    """
    from rich.progress import DownloadColumn

    with progress_bar(True, DownloadColumn()) as bar:
        task = bar.add_task("Measuring lengths", total=size)
        yield lambda share: bar.update(task, completed=int(share * (size or 0)))
