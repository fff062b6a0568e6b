"""Reads lengths from Parquet and ArrayRecord files, a few records at a time."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxbucket.base.checks import MAX_LENGTH
from jaxbucket.data.lengths.text import (
    ShowProgress,
    check_columns,
    check_no_columns,
    chosen_columns,
    empty_file_error,
    incomplete_file_error,
)
from jaxbucket.data.lengths.values import Measure, measure_all

# Number of Parquet rows, or of ArrayRecord bytes, in memory at a time.
_ROWS = 4096
_BYTES = 2**24
_READ_BYTES = 2**20


def read_parquet(
    path: pathlib.Path, columns: Sequence[str], measure: Measure, progress: ShowProgress
) -> Iterator[np.ndarray]:
    """Yields the lengths of the rows of a Parquet table, or of some of its columns.

    Raises:
      ValueError: if pyarrow is missing, the file is truncated or not Parquet, or a row
        has no length; the message names the row, counted from 0.
    """
    file = _open(path)
    names = file.schema_arrow.names
    check_columns(path, names)
    if columns or measure.length_fn is None:
        columns = chosen_columns(path, names, columns)
    places = [f"`{path}`, {name!r} row" for name in columns] or [f"`{path}`, row"]
    first = 0
    for batch in _batches(path, file, columns):
        # Integers are lengths, so those from Arrow can replace the values of a column.
        fields = [
            field if (lengths := _arrow_lengths(field, measure)) is None else lengths
            for field in map(batch.column, columns)
        ]
        if columns and all(isinstance(field, np.ndarray) for field in fields):
            yield np.stack(fields)
        else:
            values = [field.tolist() for field in fields] or [batch.to_pylist()]
            rows = enumerate(zip(*values, strict=True), first)
            yield from measure_all(places, rows, measure.of_value)
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


def _batches(path: pathlib.Path, file: Any, columns: Sequence[str]) -> Iterator[Any]:
    try:
        yield from file.iter_batches(_ROWS, columns=list(columns) or None)
    except Exception as error:
        raise incomplete_file_error(path, ".parquet", error) from None


def _arrow_lengths(column: Any, measure: Measure) -> np.ndarray | None:
    """Returns lengths computed by Arrow, or None if Python must measure or report."""
    from pyarrow import compute, types

    kind, unit = column.type, measure.unit
    if measure.length_fn is not None or column.null_count:
        return None
    if types.is_list(kind) or types.is_large_list(kind):
        if types.is_nested(kind.value_type):
            return None
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
    path: pathlib.Path, columns: Sequence[str], measure: Measure, progress: ShowProgress
) -> Iterator[np.ndarray]:
    """Yields the lengths of ArrayRecord records, in bytes by default.

    Raises:
      ValueError: if the file is truncated or not an ArrayRecord file, or a record has
        no length; the message names the record, counted from 0.
    """
    check_no_columns(columns, f"`{path}` has no columns")
    records = _records(path, progress)
    return measure_all([f"`{path}`, record"], records, measure.of_value)


def _records(
    path: pathlib.Path, progress: ShowProgress
) -> Iterator[tuple[int, tuple[bytes]]]:
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
            yield from zip(keys, zip(source.__getitems__(keys)), strict=True)
            progress(keys.stop / size)
    except RuntimeError as error:
        raise incomplete_file_error(path, ".array_record", error) from None
