"""Reads lengths from Parquet and ArrayRecord files, a few records at a time."""

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
    empty_file_error,
    incomplete_file_error,
)
from jaxbucket.data.lengths.values import Measure, measure_all

# Number of Parquet rows, or of ArrayRecord bytes, in memory at a time.
_ROWS = 4096
_BYTES = 2**24
_READ_BYTES = 2**20


def read_parquet(
    path: pathlib.Path, column: str | None, measure: Measure, progress: ShowProgress
) -> Iterator[np.ndarray]:
    """Yields the lengths of the rows of a Parquet table, or of one of its columns.

    Raises:
      ValueError: if pyarrow is missing, the file is truncated or not Parquet, or a row
        has no length; the message names the row, counted from 0.
    """
    file = _open(path)
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
            yield from measure_all(where, values, measure.of_value)
        first += len(batch)
        progress(first / max(1, file.metadata.num_rows))


def _open(path: pathlib.Path) -> Any:
    try:
        from pyarrow import parquet
    except ImportError:
        raise ValueError(
            f"Reading `{path}` requires pyarrow: pip install 'jaxbucket[parquet]'."
        ) from None
    try:
        # Without buffering, pyarrow reads a whole row group, possibly the whole file.
        return parquet.ParquetFile(path, buffer_size=_READ_BYTES, pre_buffer=False)
    except Exception as error:
        raise incomplete_file_error(path, ".parquet", error) from None


def _batches(path: pathlib.Path, file: Any, column: str | None) -> Iterator[Any]:
    columns = None if column is None else [column]
    try:
        yield from file.iter_batches(_ROWS, columns=columns)
    except Exception as error:
        raise incomplete_file_error(path, ".parquet", error) from None


def _arrow_lengths(column: Any, measure: Measure) -> np.ndarray | None:
    """Returns lengths computed by Arrow, or None if Python must measure or report."""
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
    """Yields the lengths of ArrayRecord records, in bytes by default.

    Raises:
      ValueError: if the file is truncated or not an ArrayRecord file, or a record has
        no length; the message names the record, counted from 0.
    """
    if column is not None:
        raise ValueError(f"`{path}` has no columns. Remove `--column {column}`.")
    records = _records(path, progress)
    return measure_all(f"`{path}`, record", records, measure.of_value)


def _records(path: pathlib.Path, progress: ShowProgress) -> Iterator[tuple[int, bytes]]:
    from grain.sources import ArrayRecordDataSource

    try:
        # Grain does not annotate `__getitems__`.
        source: Any = ArrayRecordDataSource(str(path))
        size = len(source)
        if not size:
            raise empty_file_error(path)
        # Limited by the mean size of a record, which may be large, such as an image.
        batch_size = max(1, min(_ROWS, size * _BYTES // path.stat().st_size))
        for start in range(0, size, batch_size):
            keys = range(start, min(start + batch_size, size))
            yield from zip(keys, source.__getitems__(keys), strict=True)
            progress(keys.stop / size)
    except RuntimeError as error:
        raise incomplete_file_error(path, ".array_record", error) from None
