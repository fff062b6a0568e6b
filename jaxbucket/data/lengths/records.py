"""Lengths from files of records: Parquet and ArrayRecord, some records at a time."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxbucket.base.checks import MAX_LENGTH
from jaxbucket.data.lengths.text import (
    ShowProgress,
    check_columns,
    chosen_column,
    empty,
    incomplete,
)
from jaxbucket.data.lengths.values import Measure, measured

# Rows of Parquet, or bytes of ArrayRecord, that are in memory together.
_ROWS = 4096
_BYTES = 2**24
_READ_BYTES = 2**20


def read_parquet(
    path: pathlib.Path, column: str | None, measure: Measure, progress: ShowProgress
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
    where = f"`{path}`, row" if column is None else f"`{path}`, {column!r} row"
    first = 0
    for batch in _batches(path, file, column):
        rows = batch if column is None else batch.column(0)
        lengths = None if column is None else _arrow_lengths(rows, measure)
        if lengths is not None:
            yield lengths
        else:
            values = enumerate(rows.to_pylist(), first)
            yield from measured(where, values, measure.of_value)
        first += len(batch)
        progress(first / max(1, file.metadata.num_rows))


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
        raise incomplete(path, ".parquet", error) from None


def _batches(path: pathlib.Path, file: Any, column: str | None) -> Iterator[Any]:
    columns = None if column is None else [column]
    try:
        yield from file.iter_batches(_ROWS, columns=columns)
    except Exception as error:
        raise incomplete(path, ".parquet", error) from None


def _arrow_lengths(column: Any, measure: Measure) -> np.ndarray | None:
    """The lengths of a batch, if all are good and Arrow can tell them by itself."""
    from pyarrow import compute, types

    kind, unit = column.type, measure.unit
    if measure.length_fn is not None or column.null_count:
        return None
    if types.is_list(kind) or types.is_large_list(kind):
        column = compute.call_function("list_value_length", [column])
    elif types.is_string(kind) or types.is_large_string(kind):
        if unit not in ("bytes", "characters"):
            return None
        function = "binary_length" if unit == "bytes" else "utf8_length"
        column = compute.call_function(function, [column])
    elif types.is_binary(kind) or types.is_large_binary(kind):
        if unit not in (None, "bytes"):
            return None
        column = compute.call_function("binary_length", [column])
    elif not types.is_integer(kind):
        return None
    lengths = column.to_numpy(zero_copy_only=False)
    if not 1 <= lengths.min(initial=1) <= lengths.max(initial=1) <= MAX_LENGTH:
        return None
    return lengths.astype(np.int32)


def read_array_record(
    path: pathlib.Path, column: str | None, measure: Measure, progress: ShowProgress
) -> Iterator[np.ndarray]:
    """Yields the lengths of records, in bytes unless `measure` says otherwise.

    Raises:
      ValueError: if the file is cut or foreign, or a record is empty; it names the
        record, counted from 0.
    """
    if column is not None:
        raise ValueError(f"`{path}` has no columns: leave out `--column {column}`.")
    records = _records(path, progress)
    return measured(f"`{path}`, record", records, measure.of_value)


def _records(path: pathlib.Path, progress: ShowProgress) -> Iterator[tuple[int, bytes]]:
    from grain.sources import ArrayRecordDataSource

    try:
        # Its methods are those of a class without types.
        source: Any = ArrayRecordDataSource(str(path))
        size = len(source)
        if not size:
            raise empty(path)
        # By their mean size, because they may be pictures.
        together = max(1, min(_ROWS, size * _BYTES // path.stat().st_size))
        for start in range(0, size, together):
            keys = range(start, min(start + together, size))
            yield from zip(keys, source.__getitems__(keys), strict=True)
            progress(keys.stop / size)
    except RuntimeError as error:
        raise incomplete(path, ".array_record", error) from None
