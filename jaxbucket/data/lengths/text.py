"""Reads lengths from line-based files: text, CSV and JSON Lines, optionally gzipped.

Files are read line by line and never held in memory as a whole.
"""

from __future__ import annotations

import contextlib
import csv
import difflib
import functools
import gzip
import json
import pathlib
import re
import shlex
import sys
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import numpy as np

from jaxbucket.data.lengths.values import Measure, measure_all, short_repr

# Called with the fraction of the file that has been read, from 0 to 1.
ShowProgress = Callable[[float], None]

# A cell between quotes, in which quotes are doubled, up to the end of the cell or line.
_QUOTED = re.compile(r'(?<![^\t])"(?:[^"]|"")*("(?![^\t])|$)')
# Number of lines between two progress updates.
_LINES = 1024


def read_text(
    path: pathlib.Path, columns: Sequence[str], measure: Measure, progress: ShowProgress
) -> Iterator[np.ndarray]:
    """Yields the lengths of the lines of a text file, or the integers on its lines.

    Like all readers, it yields int32 arrays `[Q, n]` with the lengths of n examples in
    each of Q columns. Without `columns`, Q is 1.

    Raises:
      ValueError: if a line has no length or the file is not UTF-8; the message names
        the line.
    """
    check_no_columns(columns, f"`{path}` has no columns")
    # An error keeps the lines alive, so the file is closed here.
    with contextlib.closing(_lines(path, progress)) as lines:
        texts = ((number, [line.removesuffix("\r")]) for number, line in lines)
        yield from measure_all([f"`{path}`, line"], texts, measure.of_text)


def read_csv(
    path: pathlib.Path, columns: Sequence[str], measure: Measure, progress: ShowProgress
) -> Iterator[np.ndarray]:
    """Yields the lengths of the rows of a CSV table with a header.

    The quotes of a tab-separated file are text, unless all of them enclose whole cells
    or are doubled in such cells. Blank lines at the end are ignored.

    Raises:
      ValueError: if a cell has no length, a row differs in width from the header, or
        the file is not CSV in UTF-8; the message names the line, and the column of the
        cell.
    """
    with contextlib.closing(_lines(path, progress)) as lines:
        yield from _measured_rows(path, _csv_rows(path, lines), columns, measure)


def _measured_rows(
    path: pathlib.Path,
    rows: Iterator[tuple[int, list[str]]],
    columns: Sequence[str],
    measure: Measure,
) -> Iterator[np.ndarray]:
    _, header = next(rows, (0, None))
    if header is None:
        raise empty_file_error(path)
    check_columns(path, header)
    if all(name.strip().isdecimal() for name in header):
        raise ValueError(
            f"`{path}` starts with {header} instead of column names. Add a header line "
            "with the names of the columns."
        )
    if not columns and measure.length_fn is not None:
        dicts = ((line, [dict(zip(header, row, strict=True))]) for line, row in rows)
        return measure_all([f"`{path}`, line"], dicts, measure.of_value)
    columns = chosen_columns(path, header, columns)
    indices = [header.index(name) for name in columns]
    cells = ((line, [row[index] for index in indices]) for line, row in rows)
    places = [f"`{path}`, column {name!r}, line" for name in columns]
    measure_cell = functools.partial(measure.of_text, in_column=True)
    return measure_all(places, cells, measure_cell)


def read_jsonl(
    path: pathlib.Path, columns: Sequence[str], measure: Measure, progress: ShowProgress
) -> Iterator[np.ndarray]:
    """Yields the lengths of JSON values, or of some of their fields, one per line.

    Blank lines at the end are ignored.

    Raises:
      ValueError: if a line is not JSON in UTF-8, or has no such field or no length; the
        message names the line.
    """
    places = [f"`{path}`, field {name!r}, line" for name in columns]
    with contextlib.closing(_lines(path, progress)) as lines:
        rows = _fields(path, _json_values(path, lines), columns, measure)
        yield from measure_all(places or [f"`{path}`, line"], rows, measure.of_value)


def chosen_columns(
    path: pathlib.Path, names: list[str], columns: Sequence[str]
) -> Sequence[str]:
    """Returns the columns to read: the given ones, or the only one of `names`.

    Raises:
      ValueError: if there is no such column, or none is given and there are several.
    """
    if not names:
        raise empty_file_error(path)
    if not columns and len(names) > 1:
        raise ValueError(f"`{path}` has columns {names}. Choose one with `--column`.")
    for column in columns:
        if column not in names:
            raise ValueError(f"`{path}`: {missing_column(column, names)}")
    return columns or names


def check_no_columns(columns: Sequence[str], reason: str) -> None:
    """Raises a ValueError that starts with `reason` if there are columns."""
    if columns:
        options = " ".join(f"--column {name}" for name in columns)
        raise ValueError(f"{reason}. Remove `{options}`.")


def missing_column(column: str, columns: list[str]) -> str:
    """Returns the error message for a column that is not among the columns of a file.

    Example:
      >>> missing_column("frame", ["seconds", "frames"])
      "there is no column 'frame' among ['seconds', 'frames']. Pass `--column frames`."
    """
    close = difflib.get_close_matches(column, columns, 1)
    remedy = "Choose one with `--column`"
    if close:
        remedy = f"Pass `--column {shlex.quote(close[0])}`"
    return f"there is no column {column!r} among {columns}. {remedy}."


def check_columns(path: pathlib.Path, columns: list[str]) -> None:
    """Raises a ValueError if several columns have the same name."""
    duplicates = sorted({name for name in columns if columns.count(name) > 1})
    if duplicates:
        raise ValueError(
            f"`{path}` has several columns named {duplicates}. Rename all but one."
        )


def uncompressed_suffix(path: pathlib.Path) -> str:
    """Returns the suffix without compression, such as `.csv` for `data.CSV.gz`."""
    suffix = path.suffix.lower()
    return pathlib.Path(path.stem).suffix.lower() if suffix == ".gz" else suffix


def empty_file_error(path: pathlib.Path) -> ValueError:
    """Returns the error for a file without examples."""
    return ValueError(f"`{path}` is empty. Pass a file with at least one example.")


def incomplete_file_error(path: pathlib.Path, kind: str, error: object) -> ValueError:
    """Returns the error for a file that is truncated or of a different kind."""
    reason = " ".join(str(error).split()) or type(error).__name__
    return ValueError(
        f"`{path}` is not a complete {kind} file: {reason}. Write it again."
    )


def _lines(
    path: pathlib.Path, progress: ShowProgress
) -> Generator[tuple[int, str], None, None]:
    """Yields the number of each line, from 1, and its text without the newline."""
    # A pipe has no size, so its progress is unknown.
    size = path.stat().st_size
    compressed = path.suffix.lower() == ".gz"
    number = 0
    try:
        with path.open("rb") as raw, gzip.open(raw) if compressed else raw as file:
            for number, line in enumerate(file, 1):
                # Some programs write a byte order mark at the start of a UTF-8 file.
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                yield number, text.removesuffix("\n")
                if size and number % _LINES == 0:
                    progress(raw.tell() / size)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise incomplete_file_error(path, ".gz", error) from None
    except UnicodeDecodeError as error:
        raise ValueError(
            f"`{path}`, line {number} is not UTF-8 text: {error.reason}. Convert the "
            "file to UTF-8, or give it the suffix of its format."
        ) from None


def _up_to_last(
    lines: Iterator[tuple[int, str]], blank: str = "\r"
) -> Iterator[tuple[int, str]]:
    """Yields the lines up to the last one that has other characters than `blank`."""
    skipped = []
    for line in lines:
        skipped.append(line)
        if line[1].strip(blank):
            yield from skipped
            skipped = []


def _csv_rows(
    path: pathlib.Path, lines: Iterator[tuple[int, str]]
) -> Iterator[tuple[int, list[str]]]:
    """Yields the number of the last line of each row and its cells, header first."""
    # Cells may be longer than the default limit.
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    is_tsv = uncompressed_suffix(path) == ".tsv"
    # A newline within quotes is part of the cell.
    reader = csv.reader(
        (f"{line}\n" for _, line in _up_to_last(lines)),
        delimiter="\t" if is_tsv else ",",
        quoting=csv.QUOTE_MINIMAL if not is_tsv or _is_quoted(path) else csv.QUOTE_NONE,
        strict=True,
    )
    width = None
    try:
        for row in reader:
            width = len(row) if width is None else width
            if len(row) != width:
                raise csv.Error(f"it has {len(row)} cells, but the header has {width}")
            yield reader.line_num, row
    except csv.Error as error:
        raise ValueError(
            f"`{path}`, line {reader.line_num} is not CSV: {error}. Fix the line."
        ) from None


def _is_quoted(path: pathlib.Path) -> bool:
    """Whether all quotes enclose cells, and all rows have the header's cells.

    Rows with tabs and newlines between quotes may be several ones. A pipe is assumed
    to be unquoted, because it can be read only once.
    """
    if not path.is_file():
        return False
    widths, width, is_open = set(), 0, False
    with contextlib.closing(_lines(path, lambda share: None)) as lines:
        for _, line in _up_to_last(lines):
            was_open, text = is_open, '"' * is_open + line.removesuffix("\r")
            outside = _QUOTED.sub("", text)
            is_open = any(not match[1] for match in _QUOTED.finditer(text))
            has_tabs = text.count("\t") > outside.count("\t")
            if '"' in outside or (has_tabs and (was_open or is_open)):
                return False
            width = outside.count("\t") + was_open * width
            widths |= set() if is_open else {width}
    return len(widths) == 1 and not is_open


def _json_values(
    path: pathlib.Path, lines: Iterator[tuple[int, str]]
) -> Iterator[tuple[int, Any]]:
    for number, line in _up_to_last(lines, blank=" \t\r"):
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"`{path}`, line {number} is not JSON: {error}. Fix or delete the line."
            ) from None


def _fields(
    path: pathlib.Path,
    values: Iterator[tuple[int, Any]],
    columns: Sequence[str],
    measure: Measure,
) -> Iterator[tuple[int, list[Any]]]:
    """Yields the chosen fields of every value, or the value if none is chosen."""
    has_choice = bool(columns) or measure.length_fn is None
    for number, value in values:
        if number == 1 and isinstance(value, dict) and has_choice:
            columns = chosen_columns(path, list(value), columns)
        fields = value if isinstance(value, dict) else {}
        if missing := [column for column in columns if column not in fields]:
            content = short_repr(value)
            if isinstance(value, dict):
                content = f"an object with fields {list(value)}"
            raise ValueError(
                f"`{path}`, line {number} is {content}, which has no field "
                f"{missing[0]!r}. Fix the line, or choose a different field with "
                "`--column`."
            )
        yield number, [fields[column] for column in columns] if columns else [value]
