"""Lengths from files of records: Parquet and ArrayRecord, some records at a time."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxbucket.data.lengths.text import Tell, check_columns, chosen_column, empty
from jaxbucket.data.lengths.values import Measure, Unit, checked_length, measured

# Rows of Parquet, or bytes of ArrayRecord, that are in memory together.
_ROWS = 4096
_BYTES = 2**24
_READ_BYTES = 2**20


def read_parquet(
    path: pathlib.Path, column: str | None, measure: Measure, tell: Tell
) -> Iterator[np.ndarray]:
    """Yields the lengths of the rows of a table: of one column, or of whole rows.

    Raises:
      ValueError: if pyarrow is missing, the file is cut or foreign, or a row has no
        length; it names the row, counted from 0.
    """
    file = _opened(path)
    names = file.schema_arrow.names
    check_columns(path, names)
    if column is not None or measure.length_fn is None:
        column = chosen_column(path, names, column)
    first = 0
    for batch in _batches(path, file, column):
        lengths = None if column is None else _at_once(batch.column(0), measure)
        if lengths is not None and _all_good(lengths):
            yield lengths.astype(np.int32)
        else:
            # One by one, which also finds the row that is wrong.
            rows = batch if column is None else batch.column(0)
            where = f"`{path}`, row" if column is None else f"`{path}`, {column!r} row"
            yield from measured(
                where, enumerate(rows.to_pylist(), first), measure.of_value
            )
        first += len(batch)
        tell(first / max(1, file.metadata.num_rows))


def _opened(path: pathlib.Path) -> Any:
    try:
        from pyarrow import parquet
    except ImportError:
        raise ValueError(
            f"`{path}` is read by pyarrow: pip install 'jaxbucket[parquet]'."
        ) from None
    try:
        # Else a column is read for a whole group of rows, which may be the whole file.
        return parquet.ParquetFile(path, buffer_size=_READ_BYTES, pre_buffer=False)
    except Exception as error:
        raise _cut(path, ".parquet", error) from None


def _batches(path: pathlib.Path, file: Any, column: str | None) -> Iterator[Any]:
    columns = None if column is None else [column]
    try:
        yield from file.iter_batches(_ROWS, columns=columns)
    except Exception as error:
        raise _cut(path, ".parquet", error) from None


def _cut(path: pathlib.Path, kind: str, error: Exception) -> ValueError:
    said = " ".join(str(error).split()) or type(error).__name__
    return ValueError(f"`{path}` is no whole {kind} file: {said}. Write it again.")


def _at_once(column: Any, measure: Measure) -> np.ndarray | None:
    """The lengths of a batch, where Arrow knows them without Python's objects."""
    from pyarrow import compute, types

    if measure.length_fn is not None or column.null_count:
        return None
    kind = column.type
    if types.is_integer(kind):
        return column.to_numpy(zero_copy_only=False)
    if types.is_list(kind) or types.is_large_list(kind):
        function = "list_value_length"
    elif types.is_string(kind) or types.is_large_string(kind):
        function = _OF_TEXT.get(measure.unit)
    elif types.is_binary(kind) or types.is_large_binary(kind):
        function = _OF_BYTES.get(measure.unit)
    else:
        function = None
    if function is None:
        return None
    return compute.call_function(function, [column]).to_numpy(zero_copy_only=False)


_OF_TEXT: dict[Unit | None, str] = {
    "bytes": "binary_length",
    "characters": "utf8_length",
}
_OF_BYTES: dict[Unit | None, str] = {None: "binary_length", "bytes": "binary_length"}


def _all_good(lengths: np.ndarray) -> bool:
    try:
        checked_length(int(lengths.min(initial=1)))
        checked_length(int(lengths.max(initial=1)))
    except ValueError:
        return False
    return True


def read_array_record(
    path: pathlib.Path, column: str | None, measure: Measure, tell: Tell
) -> Iterator[np.ndarray]:
    """Yields the lengths of records, in bytes unless `measure` says otherwise.

    Raises:
      ValueError: if the file is cut or foreign, or a record is empty; it names the
        record, counted from 0.
    """
    if column is not None:
        raise ValueError(f"`{path}` has no columns: leave out `--column {column}`.")
    records = _records(path, tell)
    return measured(f"`{path}`, record", records, measure.of_value)


def _records(path: pathlib.Path, tell: Tell) -> Iterator[tuple[int, bytes]]:
    from grain.sources import ArrayRecordDataSource

    try:
        # Its methods are those of a class without types.
        source: Any = ArrayRecordDataSource(str(path))
        size = len(source)
        if not size:
            raise empty(path)
        # By their mean, for they may be pictures.
        together = max(1, min(_ROWS, size * _BYTES // path.stat().st_size))
        for start in range(0, size, together):
            keys = range(start, min(start + together, size))
            yield from zip(keys, source.__getitems__(keys), strict=True)
            tell(keys.stop / size)
    except RuntimeError as error:
        raise _cut(path, ".array_record", error) from None
