"""Lengths from a file of any usual kind: of lengths, or of examples to be measured."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator

import numpy as np

from jaxbucket.base.checks import check_lengths
from jaxbucket.base.progress import progress_bar
from jaxbucket.data.lengths.records import read_array_record, read_parquet
from jaxbucket.data.lengths.text import (
    ShowProgress,
    chosen_column,
    empty,
    incomplete,
    read_csv,
    read_jsonl,
    read_text,
    unpacked_suffix,
)
from jaxbucket.data.lengths.values import Measure

_NUMPY = (".npy", ".npz")
# An array, and a zip of some or of none.
_MAGIC = (b"\x93NUMPY", b"PK\x03\x04", b"PK\x05\x06")
_READERS: dict[
    str,
    Callable[[pathlib.Path, str | None, Measure, ShowProgress], Iterator[np.ndarray]],
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
    path: pathlib.Path, column: str | None = None, measure: Measure | None = None
) -> np.ndarray:
    """Returns the length of every example of a file, by one pass over it.

    What a file holds is known by its suffix: `.npy`, `.npz`, `.csv`, `.tsv`, `.jsonl`,
    `.parquet` or `.array_record`; any other is text, with an example or a length on
    each line. Files of lines may be compressed, `.jsonl.gz`. All but arrays of numpy
    are read some thousand examples at a time.

    Example:
      >>> import tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp(), "lines.txt")
      >>> _ = path.write_text("to be\\nor not to be\\n")
      >>> read_lengths(path, measure=Measure("words"))
      array([2, 4], dtype=int32)

    Args:
      path: the file.
      column: the array, column or field, where there are several.
      measure: what the length of an example is; by default integers are lengths, and
        lists and bytes are as long as they are.

    Returns:
      `[N]` integers from 1 to 2**31 - 1.

    Raises:
      ValueError: if the file is missing, empty, cut, or of another kind than its suffix
        says, there is no such column, or an example has no length; it names the row.
    """
    if path.is_dir():
        raise ValueError(f"`{path}` is a folder. Name a file in it.")
    measure = measure or Measure()
    try:
        if _kind(path) in _NUMPY:
            return _read_numpy(path, column, measure)
        read = _READERS.get(_kind(path), read_text)
        with reading_bar(path.stat().st_size) as progress:
            parts = list(read(path, column, measure, progress))
    except OSError as error:
        raise ValueError(
            f"`{path}` cannot be read: {error.strerror or error}. Name another file."
        ) from None
    lengths = np.concatenate([np.empty(0, np.int32), *parts])
    if not len(lengths):
        raise empty(path)
    return lengths


def _kind(path: pathlib.Path) -> str:
    kind = unpacked_suffix(path)
    if kind == path.suffix.lower():
        return kind
    if kind in _NUMPY or _READERS.get(kind) in (read_parquet, read_array_record):
        raise ValueError(f"`{path}` is compressed twice: unpack it by `gunzip`.")
    return kind


def _read_numpy(path: pathlib.Path, column: str | None, measure: Measure) -> np.ndarray:
    if measure != Measure():
        raise ValueError(
            f"`{path}` has lengths instead of examples: leave out `--unit` and "
            "`--length-fn`."
        )
    array = _loaded(path, column)
    try:
        return check_lengths(array)
    except ValueError as error:
        raise ValueError(f"`{path}`: {error}") from None


def _loaded(path: pathlib.Path, column: str | None) -> np.ndarray:
    """The array of a file, or that of its arrays, whatever the file is called."""
    if not path.stat().st_size:
        raise empty(path)
    with path.open("rb") as file:
        # Else numpy takes the file for a pickle, and says how to load that.
        if not file.peek(8).startswith(_MAGIC):
            raise incomplete(path, "numpy", "it does not begin as one")
        with _numpy_errors(path):
            loaded = np.load(file)
        if isinstance(loaded, np.lib.npyio.NpzFile):
            name = chosen_column(path, loaded.files, column)
            with _numpy_errors(path):
                return loaded[name]
    if column is not None:
        raise ValueError(
            f"`{path}` has one array, without a name: leave out `--column {column}`."
        )
    return loaded


@contextlib.contextmanager
def _numpy_errors(path: pathlib.Path) -> Iterator[None]:
    """Names the file in whatever a parser raises that is given other bytes."""
    try:
        yield
    except Exception as error:
        text = str(error)
        # The header of lengths is never long.
        contents = {"Object arrays": "Python objects", "Header info": "large records"}
        for start, content in contents.items():
            if start in text:
                raise ValueError(
                    f"`{path}` holds {content}, and not numbers. Save the lengths as "
                    "integers: `numpy.save(path, numpy.array(lengths, numpy.int32))`."
                ) from None
        raise incomplete(path, "numpy", error) from None


@contextlib.contextmanager
def reading_bar(size: int | None) -> Iterator[ShowProgress]:
    """Shows on a terminal, and nowhere else, how much of a file is read.

    Gives a function to be called with the share that is done.

    Args:
      size: bytes of the file, or None where nobody knows how much there is.
    """
    from rich.progress import DownloadColumn

    with progress_bar(True, DownloadColumn()) as bar:
        task = bar.add_task("Measuring lengths", total=size)
        yield lambda share: bar.update(task, completed=int(share * (size or 0)))
