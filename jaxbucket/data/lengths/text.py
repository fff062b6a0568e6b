"""Lengths from files of lines: text, CSV, JSON Lines, compressed by gzip or not.

A file is read line by line, and is never in memory as a whole.
"""

from __future__ import annotations

import csv
import gzip
import json
import pathlib
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jaxbucket.data.lengths.values import Measure, measured, shown

# Called with the share of a file that is read, from 0 to 1.
ShowProgress = Callable[[float], None]

# Lines between two calls of it.
_LINES = 1024


def read_text(
    path: pathlib.Path, column: str | None, measure: Measure, progress: ShowProgress
) -> Iterator[np.ndarray]:
    """Yields the lengths of the lines of a text, or the integers that they are.

    Raises:
      ValueError: if a line is neither or is empty, or the file is not UTF-8; it names
        the line.
    """
    if column is not None:
        raise ValueError(f"`{path}` has no columns: leave out `--column {column}`.")
    lines = ((n, text.removesuffix("\r")) for n, text in _lines(path, progress))
    return measured(f"`{path}`, line", lines, measure.of_text)


def read_csv(
    path: pathlib.Path, column: str | None, measure: Measure, progress: ShowProgress
) -> Iterator[np.ndarray]:
    """Yields the lengths of the rows of a table whose first line names its columns.

    Raises:
      ValueError: if a cell has no length, a row is not as wide as the first line, or
        the file is not CSV in UTF-8; it names the line.
    """
    rows = _csv_rows(path, progress)
    _, header = next(rows, (0, None))
    if header is None:
        raise empty(path)
    check_columns(path, header)
    if all(name.strip().isdecimal() for name in header):
        raise ValueError(
            f"`{path}` begins with {header}, and not with names of columns. Put them "
            "on a line of their own before it."
        )
    where = f"`{path}`, line"
    if column is None and measure.length_fn is not None:
        dicts = ((line, dict(zip(header, row, strict=True))) for line, row in rows)
        return measured(where, dicts, measure.of_value)
    index = header.index(chosen_column(path, header, column))
    cells = ((line, row[index]) for line, row in rows)
    return measured(where, cells, measure.of_text)


def read_jsonl(
    path: pathlib.Path, column: str | None, measure: Measure, progress: ShowProgress
) -> Iterator[np.ndarray]:
    """Yields the lengths of JSON values, or of a field of each, one on each line.

    Raises:
      ValueError: if a line is not JSON in UTF-8, or has no such field or no length; it
        names the line.
    """
    values = _json_values(path, progress)
    if column is not None or measure.length_fn is None:
        values = _fields(path, values, column)
    return measured(f"`{path}`, line", values, measure.of_value)


def chosen_column(path: pathlib.Path, columns: list[str], column: str | None) -> str:
    """Returns the column to read: the one named, or the only one.

    Raises:
      ValueError: if there is none of that name, or several and none is named.
    """
    if not columns:
        raise empty(path)
    if column is None and len(columns) == 1:
        return columns[0]
    if column not in columns:
        raise ValueError(f"`{path}` has {columns}: name one of them by `--column`.")
    return column


def check_columns(path: pathlib.Path, columns: list[str]) -> None:
    """Raises a ValueError if several columns have one name."""
    twice = sorted({name for name in columns if columns.count(name) > 1})
    if twice:
        raise ValueError(f"`{path}` has several columns {twice}. Rename all but one.")


def unpacked_suffix(path: pathlib.Path) -> str:
    """Returns the suffix that says what is in a file: `.csv` of `data.CSV.gz`."""
    suffix = path.suffix.lower()
    return pathlib.Path(path.stem).suffix.lower() if suffix == ".gz" else suffix


def empty(path: pathlib.Path) -> ValueError:
    """Returns the error of a file without examples."""
    return ValueError(f"`{path}` is empty: there is no example. Name another file.")


def incomplete(path: pathlib.Path, kind: str, error: object) -> ValueError:
    """Returns the error of a file that is cut, or is not of its kind."""
    reason = " ".join(str(error).split()) or type(error).__name__
    return ValueError(
        f"`{path}` is not a complete {kind} file: {reason}. Write it again."
    )


def _lines(path: pathlib.Path, progress: ShowProgress) -> Iterator[tuple[int, str]]:
    """The number of each line from 1 on, and its text without the final newline."""
    # A pipe has neither a size nor a place in it.
    size = path.stat().st_size
    packed = path.suffix.lower() == ".gz"
    number = 0
    try:
        with path.open("rb") as raw, gzip.open(raw) if packed else raw as file:
            for number, line in enumerate(file, 1):
                # Some programs begin a file with a mark that it is UTF-8.
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                yield number, text.removesuffix("\n")
                if size and number % _LINES == 0:
                    progress(raw.tell() / size)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise incomplete(path, ".gz", error) from None
    except UnicodeDecodeError as error:
        raise ValueError(
            f"`{path}`, line {number} is not UTF-8 text: {error.reason}. Convert the "
            "file, or name it as what it is."
        ) from None


def _csv_rows(
    path: pathlib.Path, progress: ShowProgress
) -> Iterator[tuple[int, list[str]]]:
    """The line on which each row ends, and its cells; as many as the header has."""
    # A text may be long.
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    separator = "\t" if unpacked_suffix(path) == ".tsv" else ","
    # Within quotes, a line goes on in the next one.
    lines = (f"{line}\n" for _, line in _lines(path, progress))
    reader = csv.reader(lines, delimiter=separator, strict=True)
    width = None
    try:
        for row in reader:
            width = len(row) if width is None else width
            if len(row) != width:
                raise csv.Error(f"it has {len(row)} cells, and the header {width}")
            yield reader.line_num, row
    except csv.Error as error:
        raise ValueError(
            f"`{path}`, line {reader.line_num} is not CSV: {error}. Mend the line."
        ) from None


def _json_values(
    path: pathlib.Path, progress: ShowProgress
) -> Iterator[tuple[int, Any]]:
    for number, line in _lines(path, progress):
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"`{path}`, line {number} is not JSON: {error}. Mend the line, or "
                "delete it."
            ) from None


def _fields(
    path: pathlib.Path, values: Iterator[tuple[int, Any]], column: str | None
) -> Iterator[tuple[int, Any]]:
    """That field of every value, which is the field itself if it is not an object."""
    for number, value in values:
        if number == 1 and isinstance(value, dict):
            column = chosen_column(path, list(value), column)
        if column is None:
            yield number, value
        elif isinstance(value, dict) and column in value:
            yield number, value[column]
        else:
            there = list(value) if isinstance(value, dict) else shown(value)
            raise ValueError(
                f"`{path}`, line {number} is {there}, and has no {column!r}. Mend the "
                "line, or name another field by `--column`."
            )
